"""The driver's end of the fork server: brings it up, asks it for workers, hears how they end.

The fork server is one process per worker group, a child of this one by ``subprocess``: no
``fork`` of ours, so it works in a thread, under any loop, in a daemonic pool process, and
without a main guard. It is small, has the group's environment from its first instruction on,
and goes with the group.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from aexec.errors import ConfigError
from aexec.executor.lines.launch import import_path
from aexec.executor.multiproc import forkserver

__all__ = ("Exit", "ForkServerProcess", "Recipe", "ServerEvents", "Started")


class Exit(NamedTuple):
    """How a process ended.

    Attributes:
        code: Its exit code; None when a signal ended it, or when nobody knows.
        signal: Name of the signal that ended it.
    """

    code: int | None
    signal: str | None


class Started(NamedTuple):
    """A process that was made for a rank.

    Attributes:
        pid: Its id.
        pidfd: A descriptor that means this process for ever; ours to close.
    """

    pid: int
    pidfd: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """How workers are made.

    Attributes:
        entry: ``module:function`` that a forked worker runs, given its socket's descriptor.
        command: What a fresh interpreter is started with, the socket's descriptor behind it;
            empty: workers are forked.
        preload: Modules to import before the first fork.
        env: The environment of all ranks.
    """

    entry: str
    command: tuple[str, ...]
    preload: tuple[str, ...]
    env: Mapping[str, str]


class ServerEvents(Protocol):
    """Told of what the fork server does, on the loop."""

    def server_ready(self, failed: Mapping[str, str]) -> None:
        """It has imported what it was told to, but for what ``failed``, by module."""
        ...

    def worker_started(self, rank: int, started: Started) -> None:
        """A rank has its process."""
        ...

    def worker_refused(self, rank: int, why: str) -> None:
        """A rank's process could not be made."""
        ...

    def worker_ended(self, rank: int, how: Exit) -> None:
        """A rank's process has ended."""
        ...

    def server_lost(self) -> None:
        """The server itself has ended, unasked."""
        ...


class ForkServerProcess:
    """One fork server.

    Args:
        recipe: How it makes workers.
        told: Is told what it does.
    """

    def __init__(self, recipe: Recipe, told: ServerEvents) -> None:
        self._recipe, self._told = recipe, told
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._pidfd = -1
        self._gone = asyncio.Event()
        self._is_ready = False
        self._waiting: deque[tuple[bytes, list[int]]] = deque()  # requests, one for each rank at most, with own copies

    def __repr__(self) -> str:
        waiting = f", {len(self._waiting)} requests wait" if self._waiting else ""
        return f"<ForkServerProcess pid {self.pid}: {'gone' if self._gone.is_set() else 'up'}{waiting}>"

    @property
    def pid(self) -> int:
        """Its process id; 0 before it has one."""
        return self._process.pid if self._process else 0

    def launch(self, output: int) -> None:
        """Start the process; its own output goes to ``output``, which stays the caller's to close.

        Raises:
            ConfigError: This interpreter cannot be started again.
        """
        if not sys.executable:
            raise ConfigError("sys.executable is empty: the mp executor starts this interpreter anew, and has no path")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._sock = ours
            ours.setblocking(False)
            try:
                self._process = self._popen(theirs.fileno(), output)
            except OSError as error:
                self._sock = None
                ours.close()
                raise ConfigError(
                    f"sys.executable is {sys.executable!r}, and the mp executor cannot start it anew: {error}"
                ) from error
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(ours.fileno(), self._read)
        self._loop.add_reader(self._pidfd, self._ended)
        recipe = self._recipe
        self._send(
            {"path": import_path(), "preload": recipe.preload, "entry": recipe.entry, "command": recipe.command},
        )

    def _popen(self, sock: int, output: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 - ourselves
            [sys.executable, "-P", forkserver.__file__, str(sock), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(sock,),
            env=dict(self._recipe.env),
            process_group=0,  # what a terminal sends to its group is meant for the driver, which ends us
        )

    def start(self, rank: int, env: Mapping[str, str], work: int, output: int) -> None:
        """Have the process of one rank made.

        Args:
            rank: Whose.
            env: Its own variables, on top of the recipe's.
            work: Its socket; the caller may close it afterwards.
            output: Where its standard output and error go; likewise.
        """
        self._send({"start": rank, "env": dict(env)}, [work, output])

    async def close(self, patience: float) -> bool:
        """End it, and with it what is left of its workers; False: it had to be killed.

        Args:
            patience: Seconds that it may take.
        """
        if self._process is None:
            return True
        if not self._is_ready:  # it imports, and hears nothing before it has: there is nothing to be lost
            self.kill()
        self._hang_up()
        try:
            await asyncio.wait_for(self._gone.wait(), patience)
        except TimeoutError:
            self.kill()
            await self._gone.wait()
            return False
        return True

    def kill(self) -> None:
        """Its workers go with it, by themselves."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _send(self, request: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send it, or as soon as there is room: it takes none while it imports or starts others."""
        if self._sock is not None:
            data = json.dumps(request).encode()
            if self._waiting or not _put(self._sock, data, fds):
                self._waiting.append((data, _copies(fds)))
                self._loop.add_writer(self._sock.fileno(), self._send_waiting)

    def _send_waiting(self) -> None:
        try:
            while self._sock is not None and self._waiting and _put(self._sock, *self._waiting[0]):
                _, fds = self._waiting.popleft()
                _close_all(fds)
        except OSError:  # it never can be sent, as with too many descriptors on their way: no worker will come
            self._drop_waiting()
            self.kill()
        if self._sock is not None and not self._waiting:
            self._loop.remove_writer(self._sock.fileno())

    def _drop_waiting(self) -> None:
        while self._waiting:
            _close_all(self._waiting.popleft()[1])

    def _read(self) -> None:
        while self._sock is not None:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, forkserver.MAX_DATAGRAM, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data, fds = b"", []
            if not data:
                self._loop.remove_reader(self._sock.fileno())  # its end is told by the pidfd
                return
            self._hear(json.loads(data), fds)

    def _hear(self, report: dict[str, Any], fds: list[int]) -> None:
        if "ready" in report:
            self._is_ready = True
            self._told.server_ready(report["failed"])
        elif "started" in report:
            self._told.worker_started(report["started"], Started(report["pid"], fds[0]))
        elif "refused" in report:
            self._told.worker_refused(report["refused"], report["why"])
        else:
            number: int | None = report["signal"]
            name = None if number is None else _signal_name(number)
            self._told.worker_ended(report["ended"], Exit(report["exit_code"], name))

    def _hang_up(self) -> None:
        """Close our end: for the server this is the order to end."""
        sock, self._sock = self._sock, None
        if sock is not None:
            self._loop.remove_reader(sock.fileno())
            self._loop.remove_writer(sock.fileno())
            sock.close()
        self._drop_waiting()

    def _ended(self) -> None:
        """The process has ended: nothing of it is left but its exit status."""
        assert self._process is not None
        self._loop.remove_reader(self._pidfd)
        self._read()
        unasked = self._sock is not None
        self._hang_up()
        os.close(self._pidfd)
        self._pidfd = -1
        self._process.poll()
        self._gone.set()
        if unasked:
            self._told.server_lost()


def _put(sock: socket.socket, data: bytes, fds: Sequence[int]) -> bool:
    """False: there is no room."""
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended: that is told by itself
            socket.send_fds(sock, [data], list(fds))
    except BlockingIOError:
        return False
    return True


def _copies(fds: Sequence[int]) -> list[int]:
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))  # noqa: PERF401 - those that were made are closed if one cannot be
    except OSError:
        _close_all(copies)
        raise
    return copies


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
