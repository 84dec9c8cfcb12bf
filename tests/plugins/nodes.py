"""Two nodes for tests: a program that leads on one, ``aexec worker`` on the other, and the line between them.

They are two addresses of loopback, with a relay between them that can be cut; with
``AEXEC_TEST_NAMESPACES=1`` (``nox -s netns``, as root) they are two network namespaces, whose
line is cut by taking the interface down.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import MappingProxyType

import pytest
import ray_namespaces

from aexec.parallel.rendezvous import PortReservation
from aexec.testing.processes import ProcessWatch, descendants
from aexec.transport.curve import NodeKey

APART = os.environ.get("AEXEC_TEST_NAMESPACES") == "1"
NEAR, FAR = "127.0.0.2", "127.0.0.3"
PATIENCE = 30.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}  # torch asks for the name of each peer

PRELUDE = """
import asyncio, json, os, signal, sys, time
from aexec import AsyncLLM, ExecuteModel, ExecutorConfig, ParallelConfig, Restart, SamplingParams, open_executor
from aexec.errors import AexecError, WorkerDied
from aexec.messages.step import StepId

PLACE = json.loads(sys.argv[1])

def config(tensor=1, pipeline=4, **settings):
    ours = {"worker_cls": "aexec.testing.faulty:FaultyWorker", "close_grace": 1.0, "start_timeout": 40.0}
    return ExecutorConfig(backend="mp", parallel=ParallelConfig(tensor, pipeline), **PLACE | ours | settings)

def make(*layout, **settings):
    return open_executor(config(*layout, **settings))

def say(**facts):
    print(json.dumps(facts), flush=True)

def facts_of(error):
    return {"error": type(error).__name__, "text": str(error), "at": time.monotonic(),
            "notes": getattr(error, "__notes__", [])}
"""


class Running:
    """A process that a test has started, with all that descends from it."""

    def __init__(self, command, folder, name, variables):
        self._folder = folder
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        self._read = 0
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=err, start_new_session=True,
                env={**os.environ, **ENVIRONMENT, **variables},
            )  # fmt: skip
        self.pid = self.process.pid

    @property
    def errors(self):
        """What it has written to its standard error so far."""
        return self._err.read_text()

    def hear(self, timeout=PATIENCE):
        """The next of the facts that a leader says."""
        return json.loads(self._wait_for(self._next_line, timeout))

    def shows(self, text, timeout=PATIENCE):
        """The first line of its standard error that has this text."""
        return self._wait_for(
            lambda: next((line for line in self.errors.splitlines() if text in line), None), timeout, text
        )

    def _next_line(self):
        lines = self._out.read_text().splitlines(keepends=True)
        if len(lines) > self._read and lines[self._read].endswith("\n"):
            self._read += 1
            return lines[self._read - 1]
        return None

    def _wait_for(self, find, timeout, what="a line"):
        give_up = time.monotonic() + timeout
        while True:
            ended = self.process.poll() is not None
            found = find()
            if found is not None:
                return found
            if ended or time.monotonic() > give_up:
                how = f"ended with {self.process.returncode}" if ended else f"has not said it in {timeout:g} s"
                said = "\n".join(f"-- {path.name}\n{path.read_text()}" for path in sorted(self._folder.glob("*er*.*")))
                raise AssertionError(f"{what!r}: {self._out.name} {how}:\n{said}")
            time.sleep(0.005)

    def watch(self):
        """Itself and all that descends from it now."""
        return ProcessWatch([self.pid, *descendants(self.pid)])

    def kill(self, number=signal.SIGKILL):
        """Send it alone a signal."""
        os.kill(self.pid, number)

    def kill_all(self):
        """As if its node's power had gone."""
        for pid in [self.pid, *descendants(self.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def finish(self, timeout=PATIENCE):
        """Its exit code, once it has ended."""
        return self.process.wait(timeout)

    def end(self):
        """Leave nothing of it, whatever happened."""
        self.kill_all()
        self.process.stdin.close()
        self.process.wait(PATIENCE)


class Relay:
    """A way to an address, which can be cut: then nothing comes through, and nobody is told."""

    def __init__(self, host, there):
        self._listening = socket.create_server((host, 0))
        self.address = self._listening.getsockname()
        self._there = there
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._awake, self._wake = socket.socketpair()
        self._selector.register(self._awake, selectors.EVENT_READ)
        self._other = {}
        self.is_cut = False
        self._thread = threading.Thread(target=self._run, name="relay")
        self._thread.start()

    def close(self):
        """End it."""
        self._wake.close()
        self._thread.join(PATIENCE)

    def _run(self):
        with contextlib.closing(self._selector):
            while True:
                for key, _ in self._selector.select(0.05):
                    if key.fileobj is self._awake:
                        for sock in (self._listening, self._awake, *self._other):
                            sock.close()
                        return
                    if not self.is_cut:
                        self._step(key.fileobj)
                if self.is_cut:
                    time.sleep(0.02)

    def _connect(self):
        """To whoever is there: one that is not there yet would not let anybody wait, as this does for it."""
        give_up = time.monotonic() + PATIENCE
        while time.monotonic() < give_up and self._awake.fileno() >= 0:
            with contextlib.suppress(OSError):
                return socket.create_connection(self._there, 1.0)
            time.sleep(0.05)
        return None

    def _step(self, sock):
        if sock is self._listening:
            near, _ = sock.accept()
            far = self._connect()
            if far is None:
                near.close()
                return
            self._other[near], self._other[far] = far, near
            for each in (near, far):
                self._selector.register(each, selectors.EVENT_READ)
            return
        if sock not in self._other:
            return
        try:
            data = sock.recv(1 << 16)
            if data:
                self._other[sock].sendall(data)
        except OSError:
            data = b""
        if not data:
            for each in (sock, self._other.pop(sock)):
                self._other.pop(each, None)
                self._selector.unregister(each)
                each.close()


class Nodes:
    """Two nodes.

    Attributes:
        near: The leader's address.
        far: The follower's.
        port: On which the leader listens.
        key: The file with their key.
    """

    is_apart = APART

    def __init__(self, folder, undo):
        self._folder, self._undo = folder, undo
        self._count = 0
        self.key = folder / "nodes.key"
        NodeKey.make(self.key)
        self._prefix = {"near": [], "far": []}
        self._relay = None
        if APART:
            made = undo.enter_context(ray_namespaces.namespaces())
            (near, self.near), (far, self.far) = made.items()
            self._prefix = {"near": ray_namespaces.within(near), "far": ray_namespaces.within(far)}
            self._far_name = far
            self.port = 29501
        else:
            self.near, self.far = NEAR, FAR
            reservation = PortReservation(NEAR)
            undo.callback(reservation.close)
            self.port = reservation.port

    @staticmethod
    def new_key(path):
        """Another key."""
        NodeKey.make(path)

    def on_one_machine(self, address):
        """Both at one address, of a machine that has it."""
        self.near = self.far = address
        self._prefix["far"] = self._prefix["near"]

    def hold_port(self):
        """Have somebody else listen on the leader's port."""
        text = f"import socket, sys; s = socket.create_server(({self.near!r}, {self.port})); print('{{}}', flush=True); input()"
        owner = self._start("near", [sys.executable, "-c", text], "owner")
        owner.hear()
        return owner

    def lead(self, text, **settings):
        """A program of node 0; it has PRELUDE before it."""
        place = {
            "nnodes": 2, "master_addr": self.near, "master_port": self.port, "node_key_file": str(self.key), **settings,
        }  # fmt: skip
        return self._start("near", [sys.executable, "-c", PRELUDE + text, json.dumps(place)], "leader")

    def follow(self, **options):
        """The agent of node 1; names in capitals are environment variables."""
        variables = {name: options.pop(name) for name in list(options) if name.isupper()}
        given = {
            "nnodes": 2, "node_rank": 1, "master_addr": self.near, "master_port": self.port, "key_file": self.key,
            "host_ip": self.far, "join_timeout": 30, **options,
        }  # fmt: skip
        words = [
            word
            for name, value in given.items()
            if value is not None
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        return self._start("far", [sys.executable, "-m", "aexec", "worker", *words], "follower", variables)

    def way_to_be_cut(self):
        """What a follower needs to come by a line that can be cut."""
        if APART:
            return {}
        self._relay = Relay(FAR, (self.near, self.port))
        self._undo.callback(self._relay.close)
        host, port = self._relay.address
        return {"master_addr": host, "master_port": port}

    def cut(self):
        """From now on nothing comes from one node to the other."""
        if APART:
            subprocess.run(["ip", "-n", self._far_name, "link", "set", "eth0", "down"], check=True, timeout=PATIENCE)
        else:
            self._relay.is_cut = True

    def _start(self, where, command, name, variables=MappingProxyType({})):
        self._count += 1
        running = Running([*self._prefix[where], *command], self._folder, f"{name}{self._count}", variables)
        self._undo.callback(running.end)
        return running


@pytest.fixture
def nodes(tmp_path):
    """Two nodes, of which nothing is left afterwards."""
    with contextlib.ExitStack() as undo:
        yield Nodes(Path(tmp_path), undo)
