"""Promises of an executor about calls: replies, errors, deadlines, order."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time

from aexec.errors import CallTimeout, ConfigError, RemoteError, UnknownMethod
from aexec.executor.base import Executor
from aexec.testing.expect import (
    SOON,
    MakeExecutor,
    all_are_in,
    equal,
    eventually,
    holds,
    let_go,
    log_of,
    raising,
    within,
)
from aexec.testing.workers import ProbeError, ProbeWorker

__all__ = ("CALL_CHECKS",)


async def replies_come_in_rank_order(make: MakeExecutor) -> None:
    """All ranks answer, each for itself, or those that were asked."""
    async with make(ProbeWorker) as executor:
        size = executor.world_size
        places = await executor.collective_rpc("place")
        equal([place[0] for place in places], list(range(size)), "replies come in rank order")
        equal({place[1] for place in places}, {size}, "each worker knows the world size")
        some = [size - 1, 0][: 1 + (size > 1)]
        chosen = await executor.collective_rpc("place", ranks=some)
        equal([place[0] for place in chosen], sorted(some), "chosen ranks answer in rank order")
        equal(await executor.collective_rpc("echo", kwargs={"value": 7}), [7] * size, "keywords reach the method")
        called = await executor.collective_rpc(_rank_plus, (10,))
        equal(called, [10 + rank for rank in range(size)], "a callable gets the worker, then its arguments")
        equal(await executor.collective_rpc("async_echo", (3,)), [3] * size, "async methods answer")
        with raising(ConfigError, "a rank that does not exist is refused"):
            await executor.collective_rpc("echo", (1,), ranks=[size])


async def one_reply_may_be_enough(make: MakeExecutor) -> None:
    """The call runs on all ranks and fails with any of them; the replies of others stay where they are."""
    async with make(ProbeWorker) as executor:
        last = executor.world_size - 1
        for method in ("echo", "async_echo"):
            equal(await executor.collective_rpc(method, (3,), reply_rank=last), [3], "the one that was asked for")
        await executor.collective_rpc("note", ("here",), reply_rank=0)
        equal(list(await log_of(executor, last))[-1:], ["here"], "it runs on all ranks")
        with raising(ProbeError, "an error of a rank whose reply is not wanted counts"):
            await executor.collective_rpc("fail", ("bad", 1, 0), reply_rank=last)
        with raising(ConfigError, "a rank that is not called cannot reply"):
            await executor.collective_rpc("echo", (1,), ranks=[0], reply_rank=last + 1)


async def unknown_methods_are_refused_before_anything_is_sent(make: MakeExecutor) -> None:
    """RPC-15, G52: at once, by name."""
    async with make(ProbeWorker) as executor:
        with raising(UnknownMethod, "an unknown method is refused") as caught, within(SOON, "at once"):
            await executor.collective_rpc("no_such_method")
        holds("no_such_method" in str(caught.error), "the error names the method")
        with raising(TypeError, "wrong arguments raise TypeError") as wrong, within(SOON, "at once"):
            await executor.collective_rpc("echo")
        holds(isinstance(wrong.error, RemoteError), "it is a RemoteError too")
        equal(await executor.collective_rpc("echo", (1,)), [1] * executor.world_size, "the executor lives on")


async def errors_keep_their_type(make: MakeExecutor) -> None:
    """Promise 4, RPC-08: type, attributes, rank, method, traceback; on ranks that do not reply as well."""
    async with make(ProbeWorker) as executor:
        last = executor.world_size - 1
        with raising(ProbeError, "an error is an instance of its own type") as caught:
            await executor.collective_rpc("fail", ("some text", 42), kwargs={"rank": last})
        error = caught.error
        holds(isinstance(error, RemoteError), "an error is a RemoteError")
        assert isinstance(error, RemoteError)
        equal((error.rank, error.method), (last, "fail"), "it carries rank and method")
        equal((error.args, getattr(error, "code", None)), (("some text",), 42), "it keeps arguments and attributes")
        holds("in fail" in error.traceback_text, "it carries the remote traceback as text")
        equal(await executor.collective_rpc("echo", (1,)), [1] * executor.world_size, "the executor lives on")


async def the_first_failure_reaches_the_caller_at_once(make: MakeExecutor) -> None:
    """Promise 2, G06: although the other ranks hang."""
    async with make(ProbeWorker) as executor:
        last = executor.world_size - 1
        with raising(ValueError, "the error is raised") as caught, within(SOON, "the first error comes at once"):
            await executor.collective_rpc("fail_or_block", (last, 1.2))
        for rank in range(last):
            holds(f"rank {rank}: no answer" in caught.notes, "the states of the others are notes")
        with within(SOON + 1.2, "the ranks are free when they have answered"):
            equal(await executor.collective_rpc("echo", (1,)), [1] * executor.world_size, "no old answer is left")


async def limits_are_checked_before_anything_runs(make: MakeExecutor) -> None:
    """G04: zero and less is past already, NaN is refused, and only None means no limit."""
    async with make(ProbeWorker) as executor:
        for limit in (0, -1.0):
            with raising(CallTimeout, f"a limit of {limit} is past") as caught, within(SOON, "at once"):
                await executor.collective_rpc("note", ("never",), timeout=limit)
            holds(not caught.error.started, "and says that nothing ran")
        with raising(ConfigError, "NaN is no limit"):
            await executor.collective_rpc("note", ("never",), timeout=float("nan"))
        equal(await log_of(executor), [], "nothing ran")


async def one_budget_covers_all_ranks(make: MakeExecutor) -> None:
    """Promise 1, G03: not one for each rank; and the error shows what the ranks are doing (G69)."""
    async with make(ProbeWorker, rpc_timeout=0.2) as executor:
        with raising(CallTimeout, "a call past its limit fails") as caught, within(0.2 + SOON, "in time"):
            await executor.collective_rpc("hold")
        await let_go(executor)
        holds(caught.error.started, "it had started")
        holds("hold" in str(caught.error), "the error names the method")
        holds("in hold" in caught.notes, "its notes show the stacks")


async def a_call_past_its_limit_in_the_queue_never_runs(make: MakeExecutor) -> None:
    """Promise 1, G04: it fails at its limit, and the executor goes on."""
    async with make(ProbeWorker) as executor:
        ahead = asyncio.ensure_future(executor.collective_rpc("hold"))
        await all_are_in(executor, "hold")
        with raising(CallTimeout, "a queued call fails at its limit") as caught, within(0.1 + SOON, "in time"):
            await executor.collective_rpc("note", ("never",), timeout=0.1)
        holds(not caught.error.started, "it says that it never started")
        holds("hold" in caught.notes, "its notes say what it waited for")
        await let_go(executor)
        equal(await ahead, list(range(executor.world_size)), "the call ahead is undisturbed")
        equal(await log_of(executor), ["held"], "it never ran")


async def answers_never_reach_another_caller(make: MakeExecutor) -> None:
    """RPC-05, G05: calls with random limits and random lengths, from several tasks at once."""
    chance = random.Random(5)  # noqa: S311 - a reproducible game
    async with make(ProbeWorker) as executor:

        async def caller(number: int) -> None:
            for turn in range(8):
                entry = number * 100 + turn
                pause = chance.uniform(0.0, 0.008)
                with contextlib.suppress(CallTimeout):
                    replies = await executor.collective_rpc(
                        _nap_and_echo, (pause, entry), timeout=chance.uniform(0.002, 0.05)
                    )
                    equal(replies, [entry] * executor.world_size, "each caller has its own answers")

        await asyncio.gather(*(caller(number) for number in range(6)))
        equal(await executor.collective_rpc("echo", ("end",)), ["end"] * executor.world_size, "and so has the last")


async def cancelling_a_call_frees_its_place(make: MakeExecutor) -> None:
    """G28, G29: queued, it never runs; an async method is cancelled; the neighbours are undisturbed."""
    async with make(ProbeWorker) as executor:
        ahead = asyncio.ensure_future(executor.collective_rpc("hold"))
        queued = asyncio.ensure_future(executor.collective_rpc("note", ("never",)))
        waiting = asyncio.ensure_future(executor.collective_rpc("async_block", (30.0,)))
        behind = asyncio.ensure_future(executor.collective_rpc("note", ("behind",)))
        await all_are_in(executor, "hold")
        await executor.collective_rpc("async_echo", ("here",))  # what was sent before it has begun
        queued.cancel()
        waiting.cancel()
        await asyncio.wait([queued, waiting])
        holds(queued.cancelled() and waiting.cancelled(), "a cancelled caller ends as cancelled")
        await let_go(executor)
        await asyncio.gather(ahead, behind)

        async def all_is_written() -> bool:
            return len(await log_of(executor)) == 3

        await eventually(all_is_written, "an async method hears of its cancellation")
        found = list(await log_of(executor))
        equal(sorted(found), ["behind", "held", "waited cancelled"], "the cancelled call never ran")


async def async_methods_run_beside_plain_ones(make: MakeExecutor) -> None:
    """The loop of the worker is free while its compute thread is busy."""
    async with make(ProbeWorker) as executor:
        held = asyncio.ensure_future(executor.collective_rpc("hold"))
        await all_are_in(executor, "hold")
        await executor.collective_rpc("async_echo", (1,))
        holds(not held.done(), "an async method does not wait for a plain one")
        await let_go(executor)
        await held


async def a_cancellation_within_a_call_is_its_error(make: MakeExecutor) -> None:
    """An async method that awaits what was cancelled fails like any other; the worker lives on."""
    async with make(ProbeWorker) as executor:
        with raising(RuntimeError, "it is an error of the call") as caught, within(SOON, "at once"):
            await executor.collective_rpc(_await_the_cancelled)
        holds(isinstance(caught.error, RemoteError), "it is a RemoteError too")
        for method in ("echo", "async_echo"):
            equal(await executor.collective_rpc(method, (1,)), [1] * executor.world_size, "the worker lives on")


async def the_loop_is_free_while_workers_work(make: MakeExecutor) -> None:
    """G10: a ticker goes on during a blocking method."""
    async with make(ProbeWorker) as executor:
        least = math.inf  # of several: a machine that stands still for a moment stops the loop in one of them
        for _ in range(3):
            least = min(least, await _largest_gap(executor, 0.3))
        holds(least < 0.2, f"the loop turns meanwhile: the largest gap was {least:.3g} s")


async def _largest_gap(executor: Executor, seconds: float) -> float:
    """Seconds between two turns of the loop, at most, while the ranks block for so many."""
    blocked = asyncio.ensure_future(executor.collective_rpc("block", (seconds,)))
    largest, last = 0.0, time.monotonic()
    while not blocked.done():
        await asyncio.sleep(0.005)
        now = time.monotonic()
        largest, last = max(largest, now - last), now
    return largest


def _rank_plus(worker: ProbeWorker, number: int) -> int:
    return worker.context.rank + number


def _nap_and_echo(worker: ProbeWorker, seconds: float, value: int) -> int:
    time.sleep(seconds)
    worker.note(value)
    return value


async def _await_the_cancelled(_worker: ProbeWorker) -> None:
    never = asyncio.get_running_loop().create_future()
    never.cancel()
    await never


CALL_CHECKS = (
    replies_come_in_rank_order,
    one_reply_may_be_enough,
    unknown_methods_are_refused_before_anything_is_sent,
    errors_keep_their_type,
    the_first_failure_reaches_the_caller_at_once,
    limits_are_checked_before_anything_runs,
    one_budget_covers_all_ranks,
    a_call_past_its_limit_in_the_queue_never_runs,
    answers_never_reach_another_caller,
    cancelling_a_call_frees_its_place,
    async_methods_run_beside_plain_ones,
    a_cancellation_within_a_call_is_its_error,
    the_loop_is_free_while_workers_work,
)
