"""An executor's life: start, death, restart, drain, close, whatever the backend.

A death ends all calls first; only then is anything cleaned up, and rebuilt where
``ExecutorConfig.on_failure`` says so.
"""

from __future__ import annotations

import itertools
import time

import anyio

from aexec.actor import Actor, Deferred, Exit, handles
from aexec.config import ExecutorConfig, Restart
from aexec.errors import AexecError, CallTimeout, ExecutorClosed, ProtocolError, WorkerDied, note
from aexec.executor.board import Board
from aexec.executor.calls import Close, Open, Wake
from aexec.executor.collective import Call
from aexec.executor.copies import own_copy
from aexec.executor.fanout import Fanout
from aexec.executor.gate import StepGate, default_limit
from aexec.executor.generation import Generation
from aexec.executor.group import WorkerGroup
from aexec.executor.lifecycle import ExecutorEvent, ExecutorState, advance, refusal
from aexec.executor.memory import Memory
from aexec.executor.restart import RestartBudget
from aexec.executor.steps import StepLine
from aexec.messages.lifecycle import GroupRestarted, WorkerStarted
from aexec.worker.context import Progress

__all__ = ("ExecutorLife",)

_OVER = (ExecutorState.CLOSING, ExecutorState.CLOSED)
_READY = ExecutorState.READY  # looked up for each call, which takes an enum's member 70 ns


class ExecutorLife(Actor):
    """Runs one worker group, and rebuilds it if it is told to.

    Args:
        config: The settings.
        backend: Makes the group.
        board: What the façade reads.
        progress: Told how far a start has come.
    """

    def __init__(
        self, config: ExecutorConfig, backend: type[WorkerGroup], board: Board, progress: Progress | None = None
    ) -> None:
        self._config, self._backend, self._board, self._progress = config, backend, board, progress
        self._ids = itertools.count(1)
        self._now: Generation | None = None
        self._steps: StepLine
        self._memory: Memory
        self._budget = RestartBudget(config.on_failure if isinstance(config.on_failure, Restart) else None)
        self._reason = ""
        self._up_again: float | None = None  # when the next restart begins
        self._rebuild: anyio.CancelScope | None = None
        self._rebuilt = anyio.Event()
        self._drain = anyio.CancelScope()
        self._closers: list[Deferred[None]] = []

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._board!r}, {self._budget!r}>"

    async def on_start(self) -> None:
        """Make the gate for steps; it outlives the generations."""
        board = self._board
        limit = self._config.max_concurrent_steps or default_limit(self._config.parallel.pipeline_parallel_size)
        gate = board.gate = StepGate(limit, self._config.step_timeout)
        self._steps = StepLine(gate, self.context, world_size=board.world_size, output_rank=board.output_rank)

    async def on_stop(self, reason: Exit) -> None:  # noqa: ARG002
        """Close, unless that was done; a close that was cut short is brought to its end."""
        await self._shut()
        if self._now is not None:
            await self._now.retire()

    @handles(Open)
    async def open(self, message: Open) -> None:  # noqa: ARG002
        """Bring up the first generation; its asker's cancellation ends that too.

        Raises:
            CallTimeout: ``start_timeout`` has passed.
            WorkerDied: A rank ended.
            AexecError: What a rank raised.
        """
        await self._bring_up()
        self._ready()

    @handles(Close, lane="urgent")
    def close(self, message: Close) -> Deferred[None]:
        """End all calls and all workers; all who ask wait for the one end, the most impatient says when."""
        reply: Deferred[None] = self.context.defer(message)
        self._closers.append(reply)
        state = self._board.state
        if state is ExecutorState.CLOSED:
            self._closed()
        elif state is ExecutorState.DRAINING:
            self._drain.deadline = min(self._drain.deadline, anyio.current_time() + message.drain)
        elif state is ExecutorState.READY and message.drain > 0:
            self._board.state = advance(state, ExecutorEvent.DRAIN)
            self._drain.deadline = anyio.current_time() + message.drain  # at once: another close may be next
            self.context.start_task(self._drain_and_shut(message.drain))
        elif state is not ExecutorState.CLOSING:
            self.context.start_task(self._shut())
        return reply

    @handles(Wake, lane="urgent")
    def wake(self, message: Wake) -> None:  # noqa: ARG002
        """The timer of the calls."""
        self._generation.fanout.wake()
        self._steps.wake()

    @property
    def _generation(self) -> Generation:
        assert self._now is not None, "the executor was not opened"
        return self._now

    def _fanout(self) -> Fanout:
        """Where calls go, if any can be taken."""
        state = self._board.state
        if state is _READY and self._now is not None:
            return self._now.fanout
        wait = None if self._up_again is None else max(self._up_again - time.monotonic(), 0.0)
        refused = refusal(state, self._reason, wait)
        if refused is not None:
            raise refused
        if state is ExecutorState.FAILED:
            failure = self._board.callbacks.failure
            assert failure is not None
            raise own_copy(failure, "the executor has failed for good: close it, and open another")
        return self._generation.fanout

    async def _bring_up(self) -> None:
        self._now = Generation(
            self._backend,
            self._config,
            self.context,
            self._board,
            progress=self._progress,
            ids=self._ids,
            died=self._rank_died,
            lost=self._group_lost,
            timed_out=self._call_timed_out,
            previous=self._now,
        )
        await self._now.start()

    def _ready(self) -> None:
        board, generation = self._board, self._generation
        self._memory = board.memory = Memory(self._steps, board.world_size)
        hello = generation.hellos[0]
        self._steps.attach(generation.fanout, samples="sample_tokens" in hello.methods or hello.dynamic)
        board.state = advance(board.state, ExecutorEvent.STARTED)
        self.context.log.info(
            "workers ready", backend=board.backend, ranks=board.world_size, generation=generation.number
        )
        for hello in generation.hellos:
            board.events.emit(WorkerStarted(rank=hello.rank, pid=hello.pid, generation=generation.number))

    def _rank_died(self, error: WorkerDied) -> None:
        if self._board.state in _OVER:
            return
        self.context.log.error("worker died", rank=error.rank, pid=error.pid, phase=error.phase, step=error.step)
        self._board.events.emit(error)
        self._lose(error)

    def _group_lost(self, error: AexecError) -> None:
        if self._board.state not in _OVER:
            self.context.log.error("workers lost", why=str(error).partition("\n")[0])
            self._lose(error)

    def _call_timed_out(self, error: CallTimeout) -> None:
        if self._config.on_timeout == "fail_executor":
            self._lose(note(error, 'it fails the group, for on_timeout is "fail_executor"'))

    def _lose(self, error: AexecError) -> None:
        """End all calls, then see what becomes of the group."""
        state, now = self._board.state, time.monotonic()
        if state is ExecutorState.DRAINING:
            self._end_calls(error, now)
        if state is not ExecutorState.READY:
            return  # another rank of a group that is given up already
        delay = self._budget.spend(now)
        if delay is None:
            self._give_up(error)
            fate = self._budget.verdict()
        else:
            self._board.state = advance(state, ExecutorEvent.DIED)
            self._reason, self._up_again = str(error).partition("\n")[0], now + delay
            fate = f"the group is rebuilt: try again after {delay:.3g} s"
        self._end_calls(error, now, fate)
        self.context.start_task(self._generation.retire() if delay is None else self._restart(error, delay))

    def _end_calls(self, error: AexecError, now: float, *fate: str) -> None:
        self._generation.fanout.fail_all(lambda call: _for_call(error, call, now, *fate))
        self._steps.fail_all(error)

    def _give_up(self, error: AexecError) -> None:
        self._board.state = advance(self._board.state, ExecutorEvent.GAVE_UP)
        note(error, self._budget.verdict())
        self.context.log.error("executor failed for good", why=self._budget.verdict())
        self._generation.group.given_up(error)
        self._board.callbacks.fire(error)

    async def _restart(self, reason: AexecError, delay: float | None) -> None:
        began = time.monotonic()
        self._rebuilt = anyio.Event()
        try:
            with anyio.CancelScope() as self._rebuild:
                await self._generation.stop()
                failure = await self._rebuild_within_budget(reason, delay)
                if failure is not None:
                    self._give_up(failure)
                    await self._generation.retire()
                    return
                self._ready()
                seconds = time.monotonic() - began
                restarted = GroupRestarted(generation=self._generation.number, reason=self._reason, seconds=seconds)
                self._board.events.emit(restarted)
        finally:
            self._rebuilt.set()
            self._rebuild = None

    async def _rebuild_within_budget(self, failure: AexecError, delay: float | None) -> AexecError | None:
        """Try until it works or the budget is used up: then the last failure."""
        while delay is not None:
            self._up_again = time.monotonic() + delay
            await anyio.sleep(delay)
            try:
                await self._bring_up()
            except AexecError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - a backend's own; the executor must not hang for it
                failure = note(ProtocolError(f"the backend raised {error!r}"), "while the group was rebuilt")
            else:
                return None
            delay = self._budget.spend(time.monotonic())
        return failure

    async def _drain_and_shut(self, drain: float) -> None:
        """Let what runs come to its end, for so many seconds, and then close."""
        if self._steps.gate.paused:
            self._steps.fail_waiting(ExecutorClosed("the executor was closed while it was paused"))
        limit = ""
        with self._drain:
            await self._steps.until_idle("close", None, waiting_too=True)
            await self._generation.fanout.until_quiet()
        if self._drain.cancelled_caught:
            limit = f" when the {drain:g} s of its drain were over"
        await self._shut(limit)

    async def _shut(self, limit: str = "") -> None:
        board = self._board
        if board.state in _OVER:
            return
        board.state = advance(board.state, ExecutorEvent.CLOSE)
        if self._now is not None:
            self._now.fanout.fail_all(
                lambda call: ExecutorClosed(f"the executor was closed{limit} while {call.text} was pending")
            )
            self._steps.fail_all(ExecutorClosed(f"the executor was closed{limit}"))
        if self._rebuild is not None:
            self._rebuild.cancel()
            with anyio.CancelScope(shield=True):
                await self._rebuilt.wait()
        if self._now is not None:
            await self._now.retire()
        board.state = advance(board.state, ExecutorEvent.GONE)
        board.events.close()
        self._closed()

    def _closed(self) -> None:
        for reply in self._closers:
            reply.resolve(None)
        self._closers.clear()


def _for_call(error: AexecError, call: Call, now: float, *fate: str) -> AexecError:
    """Each caller has its own, with what was known of the other ranks and what becomes of the group."""
    rank = getattr(error, "rank", -1)
    known = (f"while {call.text} was pending", *call.others(rank, now), *call.raised_by(rank), *fate)
    return own_copy(error, *known, keep_notes=False)
