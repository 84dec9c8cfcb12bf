"""The process that workers are children of: it forks them, or starts fresh interpreters.

It is run by path, with the standard library alone, as ``python forkserver.py SOCKET PID``;
``spawn.py`` is its client. Why it is there, whatever the start method:

* It has one thread, no loop and no device, so that forking it is sound. The driver never forks.
* The kernel ties ``PR_SET_PDEATHSIG`` to the *thread* that made a child. Here that thread
  lives as long as the process; in the driver it may be one of a pool, and end any time.
* It waits for its children, so that nothing of the driver's own child handling is touched,
  and nobody there can take an exit status from us.

It ends when the driver does, and its children with it: they are killed and waited for. What
they have started themselves, and not ended, is adopted by this process, and goes with it.

Each datagram is a JSON object, with descriptors beside it. From the driver: first the
set-up (``path``, ``preload``, ``entry``, ``command``), then ``{"start": rank, "env": {...}}``
with the worker's socket and its output pipe. To the driver: ``{"ready": seconds, "failed":
{module: error}}``, ``{"started": rank, "pid": pid}`` with a pidfd, ``{"refused": rank, "why":
text}``, and ``{"ended": rank, "exit_code": code, "signal": number}``, one of the two null.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any, NoReturn

__all__ = ("MAX_DATAGRAM", "ForkServer")

MAX_DATAGRAM = 1 << 17  # bytes
_PR_SET_CHILD_SUBREAPER = 36  # Source: Linux, include/uapi/linux/prctl.h
_SOCKET_FD = 3  # where a fresh interpreter finds its socket


class ForkServer:
    """Makes workers on request, and tells how each ended.

    Args:
        sock: The line to the driver.
        driver: Its pid.
    """

    def __init__(self, sock: socket.socket, driver: int) -> None:
        self._sock = sock
        self._driver = os.pidfd_open(driver)
        self._workers: dict[int, int] = {}  # pidfd: rank
        self._setup: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<ForkServer pid {os.getpid()}: {len(self._workers)} workers>"

    def run(self) -> NoReturn:
        """Serve until the driver is gone, or has closed its end."""
        code = 1
        try:
            self._setup, _ = self._receive()
            if self._setup:
                self._preload()
                self._serve()
            code = 0
        except (BrokenPipeError, ConnectionResetError):
            code = 0  # the driver is gone
        except BaseException:  # noqa: BLE001 - the last that can be told of it
            traceback.print_exc()
        finally:
            self._end_workers()
            os._exit(code)

    def _preload(self) -> None:
        began = time.monotonic()
        gc.disable()  # of what is imported nothing is garbage, and looking for it takes a tenth of the time
        sys.path[:] = self._setup["path"]
        failed: dict[str, str] = {}
        for module in self._setup["preload"]:
            try:
                importlib.import_module(module)
            except Exception as error:  # noqa: BLE001 - the worker says it again, where it belongs
                failed[module] = f"{type(error).__name__}: {error}"
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        fcntl.fcntl(self._sock, fcntl.F_SETFL, 0)
        gc.enable()
        gc.freeze()  # collections in workers leave the pages of what was imported shared
        self._send({"ready": time.monotonic() - began, "failed": failed})

    def _serve(self) -> None:
        while True:
            poll = select.poll()
            for watched in (self._sock.fileno(), self._driver, *self._workers):
                poll.register(watched, select.POLLIN)
            readable = {ready for ready, _ in poll.poll()}
            for pidfd in readable & self._workers.keys():
                self._ended(pidfd)
            if self._driver in readable:
                return
            if self._sock.fileno() in readable and not self._obey():
                return

    def _obey(self) -> bool:
        """One request; False: there will be no more."""
        request, fds = self._receive()
        if not request:
            return False
        rank: int = request["start"]
        try:
            pid = self._start(fds, request["env"])
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            self._send({"refused": rank, "why": str(error)})
        else:
            self._workers[pidfd] = rank
            self._send({"started": rank, "pid": pid}, [pidfd])
        for fd in fds:
            os.close(fd)
        return True

    def _start(self, fds: list[int], env: dict[str, str]) -> int:
        work, output = fds
        command: list[str] = self._setup["command"]
        if command:
            actions = [
                (os.POSIX_SPAWN_DUP2, output, 1),
                (os.POSIX_SPAWN_DUP2, output, 2),
                (os.POSIX_SPAWN_DUP2, work, _SOCKET_FD),
            ]
            argv = [*command, str(_SOCKET_FD)]
            return os.posix_spawn(sys.executable, argv, {**_environ().inherited(), **env}, file_actions=actions)
        pid = os.fork()
        if pid == 0:
            self._become_worker(work, output, env)
        return pid

    def _become_worker(self, work: int, output: int, env: dict[str, str]) -> NoReturn:
        code = 1
        try:
            self._sock.close()
            for fd in (self._driver, *self._workers):
                os.close(fd)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            _environ().change(env)
            _own_chance()
            module, _, name = self._setup["entry"].partition(":")
            code = getattr(importlib.import_module(module), name)(work) or 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001 - shown as the interpreter would
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):  # the worker's own code has closed it
                    stream.flush()
            os._exit(code)

    def _ended(self, pidfd: int) -> None:
        rank = self._workers.pop(pidfd)
        end = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        os.close(pidfd)
        assert end is not None  # WNOHANG was not given
        exited = end.si_code == os.CLD_EXITED
        code, by = (end.si_status, None) if exited else (None, end.si_status)
        self._send({"ended": rank, "exit_code": code, "signal": by})

    def _end_workers(self) -> None:
        for pidfd in self._workers:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for pidfd in self._workers:
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        _end_orphans()

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        """The next request with its descriptors; empty once the driver has closed its end."""
        data, fds, _, _ = socket.recv_fds(self._sock, MAX_DATAGRAM, 2, socket.MSG_CMSG_CLOEXEC)
        return (json.loads(data) if data else {}), fds

    def _send(self, report: dict[str, Any], fds: list[int] | None = None) -> None:
        socket.send_fds(self._sock, [json.dumps(report).encode()], fds or [])


def _environ() -> Any:
    """The one module that touches the environment; imported where it is used, as ``path`` has to be in force."""
    return importlib.import_module("aexec.environ")


def _own_chance() -> None:
    """Numbers that chance gives are not the same on all ranks because one was copied from the other."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _go_on(*_: object) -> None:
    """A signal that means the driver."""


def _end_with_the_driver(sock: socket.socket) -> None:
    """While modules are imported nobody polls: a signal comes instead when the line breaks."""

    def look(*_: object) -> None:
        try:
            gone = not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if gone:
            os._exit(0)

    signal.signal(signal.SIGIO, look)
    fcntl.fcntl(sock, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sock, fcntl.F_SETFL, os.O_ASYNC)


def _adopt_orphans() -> None:
    """What a worker leaves behind becomes ours, not the first process's, so that it can be ended."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_orphans() -> None:
    """What the workers have started, and what that has started."""
    while children := _children():
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def _children() -> list[int]:
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208 - the less is imported here the sooner workers are there
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{task}/children") as file:  # noqa: PTH123
            found += map(int, file.read().split())
    return found


def main() -> NoReturn:
    """Serve the driver that the command line names."""
    sock, driver = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    sock.set_inheritable(False)
    # Who presses Ctrl-C, or ends a whole process group, means the driver, which ends us. Ignored
    # signals stay ignored in workers; handled ones are at their default in a fresh interpreter.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _go_on)
    _adopt_orphans()
    _end_with_the_driver(sock)
    if os.getppid() != driver:
        os._exit(0)
    ForkServer(sock, driver).run()


if __name__ == "__main__":
    main()
