"""A worker process, and a driver that is as small as it can be."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from aexec.config import ExecutorConfig
from aexec.messages.control import CallMethod, Greet, Hello, Ping, Pong
from aexec.messages.process import Launch, PhaseReached
from aexec.messages.step import ExecuteModel, SampleTokens, StepId
from aexec.transport import BlockingChannel, Frame, Kind, Writer, seqpacket_pair
from aexec.transport.meeting import Meeting, new_secret
from aexec.transport.pickling import pickled
from aexec.worker.context import place_worker

PATIENCE = 20.0


FOREIGN = Path(__file__).with_name("foreign_process.py")


class ProcessDriver:
    """One worker process with both of its lines, driven by hand.

    Args:
        worker_cls: The worker class.
        launch: What differs from an ordinary ``Launch``.
        under_shell: A shell is the process's parent, and counts as its driver; ``process`` is the shell.
        foreign: Somebody else has made the process, and it has to come for its lines, ``"here"`` from this
            node or ``"elsewhere"`` as from another; what follows are arguments of ``foreign_process.py``.
        settings: Of the ``ExecutorConfig``.
    """

    def __init__(
        self,
        worker_cls: Any,
        launch: dict[str, Any] | None = None,
        *,
        under_shell: bool = False,
        foreign: tuple[str, ...] = (),
        **settings: Any,
    ) -> None:
        self.writer = Writer()
        self.calls = self.steps = self.steps_sent = 0
        self.heard: dict[str, list[Frame]] = {"work": [], "control": []}
        self._config = ExecutorConfig(worker_cls=worker_cls, **settings)
        self._launch, self._under_shell, self._foreign = launch or {}, under_shell, foreign

    def __enter__(self) -> Self:
        if self._foreign:
            work, control = asyncio.run(self._meet(*self._foreign))
            self.lines = {
                "work": BlockingChannel(work, self.writer, name="work"),
                "control": BlockingChannel(control, self.writer, name="control"),
            }
            self.lines["work"].send(Kind.LAUNCH, 0, self._make_launch())
            return self
        ours, theirs = seqpacket_pair()
        command = [sys.executable, "-m", "aexec.worker", "rank=0", str(theirs.fileno())]
        if self._under_shell:
            command = ["sh", "-c", '"$@" & wait', "sh", *command]
        self.process = subprocess.Popen(
            command, pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE, text=True, env=os.environ | {"KEPT": "1"}
        )
        theirs.close()
        self.lines = {"work": BlockingChannel(ours, self.writer, name="work")}
        ours, theirs = seqpacket_pair()
        self.lines["control"] = BlockingChannel(ours, self.writer, name="control")
        self.lines["work"].send(Kind.LAUNCH, 0, self._make_launch(), (theirs.fileno(),))
        theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE)
        self.process.stderr.close()
        self.hang_up()
        self.writer.close()

    @property
    def events(self) -> list[Any]:
        """What the process has told on the work line, as far as it was received."""
        return [frame.value for frame in self.heard["work"] if frame.kind is Kind.EVENT]

    @property
    def phases(self) -> list[str]:
        return [event.phase for event in self.events if isinstance(event, PhaseReached)]

    def send(self, message: Any, line: str = "work") -> int:
        """Send a message; its call id."""
        self.calls += 1
        self.steps_sent += line == "work" and isinstance(message, ExecuteModel | SampleTokens)
        self.lines[line].send(Kind.MESSAGE, self.calls, message)
        return self.calls

    def call(self, method: Any, *args: Any, line: str = "work", after: int = 0) -> int:
        """Call a method; the call's id."""
        return self.send(CallMethod(call=self.calls + 1, method=method, args=args, after=after), line)

    def step(self, num_tokens: int | None = None, **order: Any) -> ExecuteModel:
        """The next step; see ``StepProbeWorker`` for what may be ordered."""
        self.steps += 1
        return ExecuteModel(StepId(self.steps), order, num_tokens)

    def answer(self, call: int, line: str = "work") -> Frame:
        """The answer to a call, which is to come on ``line``."""
        while True:
            for frame in self.heard[line]:
                if frame.call == call:
                    return frame
            frame = self.lines[line].receive(PATIENCE)
            assert frame is not None, f"no answer to call {call}"
            self.heard[line].append(frame)

    def value(self, call: int, line: str = "work") -> Any:
        """The value of the answer."""
        frame = self.answer(call, line)
        assert frame.kind is Kind.REPLY, frame.value
        return frame.value

    def failure(self, call: int, line: str = "work") -> Any:
        """The failure that is the answer."""
        frame = self.answer(call, line)
        assert frame.kind is Kind.FAILURE, frame.value
        return frame.value

    def ask(self, message: Any) -> Any:
        """What the control line answers to a message."""
        return self.value(self.send(message, "control"), "control")

    def greet(self) -> Hello:
        return self.ask(Greet())

    def reaches(self, phase: str) -> Pong:
        """Wait until the main thread is there."""
        give_up = time.monotonic() + PATIENCE
        while (pong := self.ask(Ping())).phase != phase:
            assert time.monotonic() < give_up, f"the main thread is in {pong.phase}, and not in {phase}"
        return pong

    def event(self, kind: type[Any], line: str = "work") -> Any:
        """The next event of a kind."""
        while True:
            frame = self.lines[line].receive(PATIENCE)
            assert frame is not None, f"no {kind.__name__}"
            self.heard[line].append(frame)
            if isinstance(frame.value, kind):
                return frame.value

    def hang_up(self) -> None:
        for line in self.lines.values():
            line.close()

    def ends(self) -> int:
        """Wait for the end of the process; its exit code."""
        return self.process.wait(PATIENCE)

    async def _meet(self, where: str, *args: str) -> tuple[socket.socket, socket.socket]:
        meeting = Meeting(new_secret(), host="127.0.0.1", expect=1)
        meeting.open()
        try:
            place = pickle.dumps(meeting.place(here=where == "here")).hex()
            command = [sys.executable, str(FOREIGN), place, *args]
            self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # noqa: ASYNC220
            return await asyncio.wait_for(meeting.lines(0), PATIENCE)
        finally:
            meeting.close()

    def _make_launch(self) -> Launch:
        place = place_worker(0, self._config, generation=1, local_rank=0, node_id="here", node_ip="127.0.0.1")
        usual = {
            "rank": 0,
            "local_world_size": 1,
            "driver_pid": self.process.pid if self._under_shell else os.getpid(),
            "parent_pid": self.process.pid if self._under_shell else os.getpid(),
            "context": pickled(place),
            "sys_path": tuple(sys.path),
            "arena_bytes": self._config.arena_bytes,
        }
        return Launch(**usual | self._launch)


@pytest.fixture
def start() -> Iterator[Callable[..., ProcessDriver]]:
    """Start a worker process, and greet it; it is gone after the test."""
    started: list[ProcessDriver] = []

    def make(worker_cls: Any = "aexec.testing.faulty:FaultyWorker", *, greet: bool = True, **given: Any) -> Any:
        driver = ProcessDriver(worker_cls, **given)
        started.append(driver.__enter__())
        if greet:
            driver.greet()
        return driver

    yield make
    for driver in started:
        driver.__exit__()


@pytest.fixture(scope="module")
def lasting() -> Iterator[ProcessDriver]:
    """A process for tests that leave it idle."""
    with ProcessDriver("aexec.testing.faulty:FaultyWorker") as driver:
        driver.greet()
        yield driver


@pytest.fixture
def driver(lasting: ProcessDriver) -> ProcessDriver:
    """The lasting process, as if nothing had happened."""
    for heard in lasting.heard.values():
        heard.clear()
    lasting.value(lasting.call(lambda worker: worker.log.clear()))
    return lasting
