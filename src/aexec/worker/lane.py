"""The control line of a worker process: what may come on it, and what is done about it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

from aexec.errors import AexecError, ProtocolError
from aexec.messages.control import CallMethod, Dump, Greet, Hello, Ping, Revoke, Shutdown
from aexec.messages.process import Ended
from aexec.observe import get_logger
from aexec.transport import Frame, Kind, LoopChannel
from aexec.worker.answers import Answers
from aexec.worker.coroutines import AsyncCall
from aexec.worker.exits import exit_code, flush_output, vanish
from aexec.worker.host import WorkerHost
from aexec.worker.rank import RankState

__all__ = ("ControlLane",)

_REMEMBERED = 256  # async calls that have ended, lest they are taken for calls that have not come


class _Waiting(NamedTuple):
    steps: int  # step messages that the main thread has to be through with first
    call: AsyncCall


class _Reply:
    """The way back of one ``async def`` call."""

    def __init__(self, answers: Answers, call: int, method: str) -> None:
        self._answers, self._call, self._method = answers, call, method

    def resolve(self, value: Any) -> None:
        self._answers.reply(self._call, self._method, value)

    def fail(self, error: Exception) -> None:
        self._answers.fail(self._call, self._method, error)


class ControlLane:
    """Answers on the loop; it never waits for the main thread but in ``Shutdown``.

    Args:
        line: The control line.
        rank: What both threads know.
        wake: Wakes the main thread up if it waits for the work line.

    Attributes:
        is_over: The main thread is through, and whoever asked for that has the answer.
        answered: Set when ``Shutdown`` has its answer.
    """

    def __init__(self, line: LoopChannel, rank: RankState, wake: Callable[[], None]) -> None:
        self.is_over = False
        self.answered = threading.Event()
        self._line, self._rank, self._wake = line, rank, wake
        self._answers = Answers(line, rank.rank)
        self._greetings: list[int] = []
        self._greet: Callable[[int], None] | None = None  # answers a greeting, once that can be
        self._coroutines: dict[int, AsyncCall] = {}
        self._waiting: deque[_Waiting] = deque()
        self._ended: deque[int] = deque(maxlen=_REMEMBERED)
        self._tasks: set[asyncio.Task[None]] = set()
        self._main_ended = asyncio.Event()
        self._handlers: dict[type[Any], Callable[[int, Any], None]] = {
            Greet: self._hear_greeting,
            Ping: lambda call, _: self._answers.reply(call, "ping", self._rank.pong()),
            Dump: lambda call, _: self._answers.reply(call, "dump", self.stack()),
            Revoke: self._revoke,
            CallMethod: self._call_async,
            Shutdown: self._hear_end,
        }

    def __repr__(self) -> str:
        return f"<ControlLane: {len(self._coroutines)} async calls, {len(self._waiting)} of them wait for steps>"

    def receive(self, frame: Frame) -> None:
        """A frame has come."""
        if frame.kind is not Kind.MESSAGE:
            return
        message: object = frame.value
        handler = self._handlers.get(type(message))
        if frame.error is not None:
            self._answers.fail(frame.call, "a message", frame.error)
        elif handler is None:
            what = type(message).__name__
            self._answers.fail(frame.call, what, ProtocolError(f"{what} was sent on the control line"))
        else:
            handler(frame.call, message)

    def construction_ended(self, hello: Hello) -> None:
        """The worker is there: greetings are answered from now on."""
        self._answer_greetings(lambda call: self._answers.reply(call, "hello", hello))

    def construction_failed(self, phase: str, error: Exception) -> None:
        """There will be no worker: whoever greets is told why."""
        self._answer_greetings(lambda call: self._answers.fail(call, phase, error))

    def await_for(self, call: int, name: str, awaitable: Awaitable[Any]) -> None:
        """Await what a plain method returned, and answer for it."""
        self._start(self._async_call(call, name, lambda: awaitable))

    def start_waiting(self) -> None:
        """Start the ``async def`` methods whose steps have ended, and say which are waited for next."""
        while self._waiting:
            self._rank.steps_awaited = self._waiting[0].steps
            if self._rank.steps_ended < self._waiting[0].steps:
                return
            call = self._waiting.popleft().call
            if call.id in self._coroutines:
                self._start(call)
        self._rank.steps_awaited = None

    def main_thread_ended(self) -> None:
        """It has run the ``shutdown`` hook, if there is a plain one, and waits for :attr:`answered`."""
        self._main_ended.set()

    def stack(self) -> str:
        """The stacks of the main thread and of running ``async def`` methods."""
        return self._rank.stack() + "".join(call.stack() for call in self._coroutines.values())

    def close(self) -> None:
        """End what still runs."""
        for task in self._tasks:
            task.cancel()

    def _hear_greeting(self, call: int, _: Greet) -> None:
        if self._greet is None:
            self._greetings.append(call)
        else:
            self._greet(call)

    def _answer_greetings(self, greet: Callable[[int], None]) -> None:
        self._greet = greet
        for call in self._greetings:
            greet(call)
        self._greetings.clear()

    def _revoke(self, call: int, message: Revoke) -> None:
        running = self._coroutines.get(message.call)
        if running is not None:
            never_runs = not running.has_begun
            self._cancel(running)
        else:
            never_runs = message.call not in self._ended and self._rank.claims.revoke(message.call)
        self._answers.reply(call, "revoke", never_runs)

    def _call_async(self, call: int, message: CallMethod) -> None:
        try:
            target = self._host.target_of(message)
            if not target.is_async:
                raise ProtocolError(f"{target.name} is no async def method, and was sent on the control line")
        except AexecError as error:
            self._answers.fail(call, str(message.method), error)
            return
        make = partial(target.call, *message.args, **message.kwargs)
        waiting = self._coroutines[call] = self._async_call(call, target.name, make)
        self._waiting.append(_Waiting(message.after, waiting))
        self.start_waiting()

    @property
    def _host(self) -> WorkerHost:
        host = self._rank.host
        if host is None or not self._rank.constructed:
            raise ProtocolError(f"a call came for {self._rank!r}, which has no worker")
        return host

    def _async_call(self, call: int, name: str, make: Callable[[], Awaitable[Any]]) -> AsyncCall:
        return AsyncCall(call, name, make, _Reply(self._answers, call, name), lambda _, error: error)

    def _start(self, call: AsyncCall) -> None:
        self._coroutines[call.id] = call
        call.task = self._spawn(self._run(call))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, call: AsyncCall) -> None:
        try:
            await call.run()
        except (SystemExit, KeyboardInterrupt) as fatal:
            await self._end_process(call.name, fatal)
        finally:
            self._coroutines.pop(call.id, None)
            self._ended.append(call.id)

    def _cancel(self, call: AsyncCall) -> None:
        call.cancel()
        if not call.has_begun:
            del self._coroutines[call.id]
            self._ended.append(call.id)

    async def _end_process(self, phase: str, fatal: BaseException) -> None:
        """The main thread may be anywhere: it is not asked."""
        code = exit_code(fatal)
        self._line.send(Kind.EVENT, 0, Ended(exit_code=code, phase=phase, step=self._rank.pulse.step))
        flush_output()
        try:
            await self._line.flushed(1.0)
        finally:
            vanish(code)

    def _hear_end(self, call: int, message: Shutdown) -> None:
        self._spawn(self._shut_down(call, message.grace))

    async def _shut_down(self, call: int, grace: float) -> None:
        if not self._rank.ending:
            self._rank.ending = True
            for running in list(self._coroutines.values()):
                self._cancel(running)
            self._rank.claims.abandon()
            self._wake()
            await self._end_worker(grace)
        self.is_over = self._main_ended.is_set()
        self._answers.reply(call, "shutdown", self.is_over)
        self.answered.set()

    async def _end_worker(self, grace: float) -> None:
        try:
            async with asyncio.timeout(grace):
                await self._run_async_hook()
                await self._main_ended.wait()
        except TimeoutError:
            return

    async def _run_async_hook(self) -> None:
        if not (self._rank.constructed and self._host.methods.get("shutdown")):
            return
        try:
            await self._host.target("shutdown").call()
        except Exception:  # noqa: BLE001 - logged: an end is an end
            get_logger("aexec.worker").exception("the worker's shutdown hook failed", rank=self._rank.rank)
