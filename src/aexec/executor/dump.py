"""All that helps to find a hang, as text; made without waiting for anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from aexec.executor.board import Board
from aexec.executor.collective import MAX_OPEN, Call

__all__ = ("dump_text", "tasks_of")

_SHOWN_TASKS = 50


def dump_text(board: Board, loop: asyncio.AbstractEventLoop, stacks: Mapping[int, str] | None = None) -> str:
    """Ranks and their stacks, pending calls and steps, how full the queues are, tasks.

    Args:
        board: What is known of the executor.
        loop: Its loop.
        stacks: Of its workers; None: those that can be had without waiting.
    """
    known = stacks or {}
    if stacks is None and board.group is not None:
        known = board.group.stacks()
    lines = [repr(board), *([repr(board.group)] if board.group else []), *_queues(board)]
    for info in board.ranks():
        lines.append(f"rank {info.rank}: pid {info.pid} on {info.node}, {info.state}, {info.phase}")
        stack = known.get(info.rank) or "its stack takes a question: await executor.stacks()"
        lines += [f"  {line}" for line in stack.splitlines()]
    return "\n".join([*lines, *_pending(board, time.monotonic()), *tasks_of(loop)])


def tasks_of(loop: asyncio.AbstractEventLoop) -> list[str]:
    """A line on where each task of the loop waits."""
    lines = sorted(_task(task) for task in asyncio.all_tasks(loop))
    more = len(lines) - _SHOWN_TASKS
    return [*lines[:_SHOWN_TASKS], *([f"and {more} more tasks"] if more > 0 else [])]


def _queues(board: Board) -> list[str]:
    figures = board.statistics()
    calls = (
        f"{figures.open} of {MAX_OPEN} open, {figures.queued} queued, {figures.ended} ended, "
        f"{figures.errors} errors, {figures.timeouts} timed out, {figures.late} late answers"
    )
    paused = f"paused ({figures.paused})" if figures.paused else "not paused"
    steps = f"{figures.steps_in_flight} of {figures.max_concurrent_steps} in flight, {figures.steps_waiting} waiting"
    return [f"calls: {calls}", f"steps: {steps}, {paused}", f"memory: {figures.memory}"]


def _pending(board: Board, now: float) -> list[str]:
    calls = board.fanout.book.open.values() if board.fanout else ()
    gate = board.gate
    waiting = gate.waiting if gate else ()
    flying = (
        [flight for flight in gate.flying.values() if flight.launch is None or not flight.launch.missing]
        if gate
        else []
    )
    return [
        *(_call(call, now) for call in calls),
        *(f"step {flight.step}: launched, waits to be sampled" for flight in flying if flight.sampling is None),
        *(f"step {held.message.step}: waits to be sent, for {now - held.since:.3g} s" for held in waiting),
    ]


def _call(call: Call, now: float) -> str:
    limit = "" if call.timeout is None else f" of {call.timeout:.3g} s"
    errors = f", ranks {sorted(call.errors)} raised" if call.errors else ""
    return (
        f"call {call.id}: {call.text}, {'sent' if call.sent else 'queued'}, for {now - call.since:.3g} s{limit}, "
        f"waits for ranks {sorted(call.missing)}{errors}{'' if call.waiter else ' (its caller is gone)'}"
    )


def _task(task: asyncio.Task[object]) -> str:
    (frame,) = task.get_stack(limit=1) or (None,)
    where = "" if frame is None else f", at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
    return f"task {task.get_name()}{where}"
