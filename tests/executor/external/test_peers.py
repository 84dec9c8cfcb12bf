"""Ranks in one process, with real lines between them: what each is told, and when."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import time

import numpy as np
import pytest
import uvloop
from external_ranks import PATIENCE, RankWorld, call, everybody, hello_of, ranks

from aexec.errors import (
    ExecutorClosed,
    MessageNotPortable,
    PeerLost,
    ProtocolError,
    RanksDiverged,
    RanksMissing,
    RemoteError,
    WorkerDied,
)
from aexec.executor.external.outcomes import MOST_HELD
from aexec.messages.control import Ping
from aexec.messages.step import ExecuteModel, SampleTokens, StepId
from aexec.parallel.layout import RankLayout

pytestmark = pytest.mark.anyio

AT_ONCE = 2.0  # seconds: what issue 7 grants until all ranks know of it


@pytest.fixture(scope="module", autouse=True)
def libuv_has_its_pipe():
    """Libuv opens one pipe with the first loop of a process, for good."""
    uvloop.new_event_loop().close()


def answer(world, seq, *but):
    """All ranks but some reply to a call."""
    for rank, one in enumerate(world.peers):
        if rank not in but:
            one.replied(seq, f"reply of {rank % world.layout.replica_size} to {seq}")


def replies(seq, ranks):
    return {rank: f"reply of {rank} to {seq}" for rank in range(ranks)}


class Failure(Exception):
    """What workers raise here."""


# Calls.


@pytest.mark.parametrize(
    "anyio_backend", [("asyncio", {}), ("asyncio", {"use_uvloop": True})], ids=["asyncio", "uvloop"]
)
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("shape", [{"tensor": 1}, {"tensor": 2}, {"tensor": 2, "pipeline": 2}, {"remote_only": True}])
async def test_every_rank_gets_the_replies_of_all(shape, check):
    """One call, one reply of each rank, told once to every rank; whatever the lines are made of."""
    async with ranks(check=check, **shape) as world:
        size = world.layout.replica_size
        for number in range(1, 21):
            assert everybody(world, call("add", number)) == number
            answer(world, number)
        for sink in world.sinks:
            for number in range(1, 21):
                found = await sink.all_of(number, size)
                assert {rank: found[rank] for rank in sorted(found)} == {
                    rank: f"reply of {rank} to {number}" for rank in range(size)
                }
        facts = world.peers[0].statistics()
        assert (facts.made, facts.agreed, facts.pending, facts.held) == (20, 20 if check else 0, 0, 0)


async def test_a_reply_is_told_when_the_last_rank_has_made_its_call():
    """Not before: neither to others nor to the rank that gave it; its own value comes back as the object itself."""
    async with ranks(3) as world:
        mine = object()
        for rank in (0, 1):
            world.peers[rank].called(call("add", 1), (0, 1, 2))
        world.peers[1].replied(1, "one")
        world.peers[0].replied(1, "nought")
        await world.peers[1].whereabouts()  # there and back: what was said before has been heard
        assert [sink.replies for sink in world.sinks] == [{}, {}, {}]
        assert world.peers[0].statistics().held == 3
        world.peers[2].called(call("add", 1), (0, 1, 2))
        world.peers[2].replied(1, "two")
        for sink in world.sinks:
            assert await sink.all_of(1, 3) == {0: "nought", 1: "one", 2: "two"}
        everybody(world, call("own"), (2,))
        world.peers[2].replied(2, [mine] and 7)
        assert await world.sinks[2].all_of(2, 1) == {2: 7}


async def test_a_call_for_one_rank_is_answered_to_all():
    """The others have made it as well, and wait for its reply."""
    async with ranks(3) as world:
        value = {"mine": 1}
        seq = everybody(world, call("get"), (1,))
        world.peers[1].replied(seq, value)
        for sink in world.sinks:
            assert await sink.all_of(seq, 1) == {1: value}
        assert world.sinks[1].replies[seq][1] is value


@pytest.mark.parametrize("slow", [0, 1, 2])
async def test_a_reply_does_not_wait_for_those_of_others(slow):
    """Once all have made the call, every rank is told of those that have answered, its own too."""
    async with ranks(3) as world:
        seq = everybody(world, call("block"))
        answer(world, seq, slow)
        for sink in world.sinks:
            assert set(await sink.all_of(seq, 2)) == {0, 1, 2} - {slow}


async def test_steps_are_compared_though_nobody_answers_their_launch():
    """A launch has no reply; the sampling after it is released by both having been made alike."""
    async with ranks(2) as world:
        for number in range(1, 11):
            for one in world.peers:
                one.called(ExecuteModel(StepId(number), {"tokens": [number]}), ())
                seq = one.called(SampleTokens(StepId(number)), (0,))
            world.peers[0].replied(seq, number)
            for sink in world.sinks:
                assert await sink.all_of(seq, 1) == {0: number}
        assert world.peers[1].statistics().pending == 0


async def test_arrays_and_large_values_come_whole():
    """By shared memory on a node, by the stream between nodes."""
    for remote_only in (False, True):
        async with ranks(3, remote_only=remote_only) as world:
            seq = everybody(world, call("weights"))
            for rank, one in enumerate(world.peers):
                one.replied(seq, np.full(1 << 20, rank, np.float32))
            for sink in world.sinks:
                found = await sink.all_of(seq, 3)
                assert [found[rank].sum() for rank in range(3)] == [0, 1 << 20, 2 << 20]


async def test_the_first_failure_of_any_rank_reaches_all_at_once():
    """G06: rank 2 raises while rank 0 has not even made the call: told at once where it was made, later where not."""
    async with ranks(3) as world:
        for rank in (1, 2):
            world.peers[rank].called(call("add"), (0, 1, 2))
        world.peers[2].failed(1, Failure("no"))
        for rank in (1, 2):
            failures = await world.sinks[rank].until(lambda sink: sink.failures.get(1))
            assert "no" in str(failures[2])
        assert isinstance(failures[2], Failure)
        assert isinstance(world.sinks[1].failures[1][2], RemoteError)
        assert world.sinks[0].failures == {}
        world.peers[0].called(call("add"), (0, 1, 2))
        await world.sinks[0].until(lambda sink: sink.failures)


async def test_replies_beside_a_failure_are_told_as_well():
    """Whoever counts answers gets one of each rank, so that no later call waits for one that is held for ever."""
    async with ranks(2) as world:
        for failing in (0, 1):
            seq = everybody(world, call("add", failing))
            world.peers[failing].failed(seq, Failure("no"))
            world.peers[1 - failing].replied(seq, "yes")
            for sink in world.sinks:
                await sink.until(lambda sink, seq=seq: seq in sink.replies and seq in sink.failures)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_reply_that_cannot_travel_is_an_error_for_all(rank):
    """The rank that has it does not go on with what others never see."""
    async with ranks(2) as world:
        seq = everybody(world, call("lock"), (rank,))
        world.peers[rank].replied(seq, (value for value in "abc"))
        for sink in world.sinks:
            failures = await sink.until(lambda sink: sink.failures.get(1))
            assert isinstance(failures[rank], MessageNotPortable)


async def test_answers_are_never_given_to_another_call():
    """G05: each reply carries its call; a thousand of them, answered in any order, are each told under theirs."""
    async with ranks(2) as world:
        numbers = [everybody(world, call("echo", number)) for number in range(500)]
        for one in world.peers:
            for seq in reversed(numbers):
                one.replied(seq, seq)
        for sink in world.sinks:
            for seq in numbers:
                assert await sink.all_of(seq, 2) == {0: seq, 1: seq}


# Ranks that differ.


async def fail_all(world, *, within=AT_ONCE):
    """What every rank is told, and that no call can be made any more."""
    began = time.monotonic()
    errors = [(await sink.until(lambda sink: sink.divergence))[0] for sink in world.sinks]
    assert time.monotonic() - began < within
    for one in world.peers:
        with pytest.raises(RanksDiverged):
            one.called(call("later"), (0,))
        with pytest.raises(RanksDiverged):
            await one.agree(["a"])
    (text,) = set(map(str, errors))
    return errors[0], text


@pytest.mark.parametrize("odd", [0, 1, 2])
async def test_a_rank_with_another_argument_fails_all_of_them(odd):
    """G53: every rank is told within 2 s who differs, at which step, and what each side asked for."""
    async with ranks(3) as world:
        for rank, one in enumerate(world.peers):
            one.called(ExecuteModel(StepId(7), {"tokens": [1, 2 + (rank == odd)]}, 2), (0, 1, 2))
        error, text = await fail_all(world)
        assert (error.rank, error.call, error.step) == (odd, 1, 7)
        assert "asked for ExecuteModel(step 7, 2 tokens)" in text


async def test_a_skipped_step_is_named():
    """G54: one rank leaves step 7 out: an error that names the rank and the step, instead of a hang an hour later."""
    async with ranks(2) as world:
        for number in (6, 7):
            world.peers[0].called(ExecuteModel(StepId(number)), ())
        for number in (6, 8):
            world.peers[1].called(ExecuteModel(StepId(number)), ())
        error, text = await fail_all(world)
        assert (error.rank, error.step) == (1, 7)
        assert "rank 1 is at step 8 where step 7 is due (call 2, step 7)" in text


async def test_a_rank_that_hangs_back_does_not_hide_a_difference():
    """Rank 2 never comes: the others' difference is said shortly, without it."""
    async with ranks(3) as world:
        world.peers[0].called(call("add", 1), (0, 1, 2))
        world.peers[1].called(call("add", 2), (0, 1, 2))
        _, text = await fail_all(world)
        assert "rank 2 has not come to it" in text


async def test_each_replica_has_calls_of_its_own():
    """Replicas are given different work, and one whose ranks differ takes no other with it."""
    async with ranks(tensor=2, data=2) as world:
        for rank, one in enumerate(world.peers):
            one.called(call("add", rank if rank < 2 else 7), (0, 1))
        for sink in world.sinks[:2]:
            await sink.until(lambda sink: sink.divergence)
        answer(world, 1, 0, 1)
        for sink in world.sinks[2:]:
            assert await sink.all_of(1, 2) == replies(1, 2)
            assert sink.divergence == sink.deaths == []


async def test_without_the_check_nothing_is_compared():
    """The setting is for those who know that their ranks differ."""
    async with ranks(2, check=False) as world:
        for rank, one in enumerate(world.peers):
            one.called(call("add", rank), (0, 1))
        answer(world, 1)
        for sink in world.sinks:
            assert await sink.all_of(1, 2) == replies(1, 2)


async def test_a_rank_far_behind_is_named_before_memory_runs_out():
    """What is kept for a rank that does not come has a bound, checked or not."""
    async with ranks(2, check=False) as world:
        seq = 0
        while seq <= MOST_HELD:
            seq = world.peers[1].called(call("spin"), (1,))
            world.peers[1].replied(seq, None)
            if seq % 512 == 0:
                await world.peers[1].whereabouts()  # lines have bounds of their own
        error, text = await fail_all(world, within=PATIENCE)
        assert error.rank == 0
        assert f"rank 0 is {MOST_HELD + 1} calls behind" in text
    async with ranks(2) as world:
        with contextlib.suppress(RanksDiverged):
            while True:
                world.peers[0].called(call("spin"), (0, 1))
                await asyncio.sleep(0)
        error, text = await fail_all(world, within=PATIENCE)
        assert (error.rank, error.call) == (1, 1)
        assert "rank 1 has made no call yet" in text


# Ranks that end.


@pytest.mark.parametrize("dead", [0, 1, 2])
async def test_a_death_is_known_to_all_at_once(dead):
    """G62: the others are told at once, whatever they wait for, with what the dead rank was about."""
    async with ranks(3) as world:
        everybody(world, ExecuteModel(StepId(88), None, 1), (0, 1, 2))
        agreeing = [asyncio.ensure_future(one.agree(["a"])) for rank, one in enumerate(world.peers) if rank != dead]
        await world.peers[1].whereabouts()
        world.cut(dead)
        for rank, sink in enumerate(world.sinks):
            if rank != dead:
                async with asyncio.timeout(AT_ONCE):
                    ((error, here),) = await sink.until(lambda sink: sink.deaths)
                assert (error.rank, error.pid, here) == (dead, 1000 + dead, True)
                assert "its line to rank" in str(error)
                if dead:  # of its hub a rank knows no more than that its line has ended
                    assert (error.phase, error.step) == ("ExecuteModel(step 88, 1 tokens)", 88)
                with pytest.raises(WorkerDied):
                    world.peers[rank].called(call("later"), (0,))
        for result in await asyncio.gather(*agreeing, return_exceptions=True):
            assert isinstance(result, WorkerDied)


@pytest.mark.parametrize("dead", [0, 1, 2, 3, 5])
async def test_a_death_is_known_in_all_replicas(dead):
    """Whichever it is: a hub, that of all, or none."""
    async with ranks(tensor=2, data=3) as world:
        world.cut(dead)
        for rank, sink in enumerate(world.sinks):
            if rank != dead:
                ((error, here),) = await sink.until(lambda sink: sink.deaths)
                assert here == (rank // 2 == dead // 2)
                assert error.rank == (dead % 2 if here else dead)
                if not here:
                    assert f"it is rank {dead % 2} of replica {dead // 2}, not of {rank // 2}" in error.cause


@pytest.mark.parametrize("dead", [0, 1])
async def test_an_executor_that_fails_is_a_death_to_others(dead):
    """What it knows of its worker's end reaches them as it is."""
    async with ranks(tensor=2, data=2) as world:
        world.peers[dead].died(WorkerDied(dead, 4711, exit_code=3, phase="load_model", cause="sys.exit(3)"))
        for rank, sink in enumerate(world.sinks):
            if rank != dead:
                ((error, here),) = await sink.until(lambda sink: sink.deaths)
                assert (error.pid, error.exit_code, error.phase, here) == (4711, 3, "load_model", rank < 2)
                assert "sys.exit(3)" in error.cause
        assert world.sinks[dead].deaths == []
        with pytest.raises(WorkerDied):
            world.peers[dead].called(call("later"), (0,))


async def test_what_was_said_last_is_heard():
    """A rank that gives up closes at once, and the others hear the cause all the same."""
    async with ranks(2) as world:
        seq = everybody(world, call("add"))
        world.peers[1].failed(seq, Failure("the cause"))
        world.peers[1].died(WorkerDied(1, 4711, exit_code=3))
        await world.peers[1].close(0.0)
        ((error, _),) = await world.sinks[0].until(lambda sink: sink.deaths)
        assert error.exit_code == 3
        assert "the cause" in str(world.sinks[0].failures[seq][1])


# Ranks that are through.


async def test_closing_in_any_order_is_no_death():
    """Who is first does not matter, as long as nobody asks for more."""
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        async with ranks(3) as world:
            seq = everybody(world, call("add"))
            answer(world, seq)
            closing = []
            for rank in order:
                closing.append(asyncio.ensure_future(world.peers[rank].close(PATIENCE)))
                await asyncio.sleep(0)
            await asyncio.gather(*closing)
            assert [(sink.deaths, sink.divergence, sink.failures) for sink in world.sinks] == [([], [], {})] * 3
            with pytest.raises(ExecutorClosed):
                world.peers[0].called(call("later"), (0,))
            assert "closed" in repr(world.peers[0])


@pytest.mark.parametrize("through", [0, 1])
async def test_a_call_after_the_script_of_another_rank_has_ended_fails_naming_it(through):
    """Pending ones, later ones, and agreeing: none waits for a rank that will not come."""
    other = 1 - through
    async with ranks(2) as world:
        answer(world, everybody(world, call("add")))
        seq = world.peers[other].called(call("one more"), (0, 1))
        agreeing = asyncio.ensure_future(world.peers[other].agree(["a"]))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(world.peers[through].close(PATIENCE))
        failures = await world.sinks[other].until(lambda sink: sink.failures.get(seq))
        assert str(failures[through]).startswith(
            f"rank {through} is through (call 2): rank {through} is through after call 1 (it has closed its executor)"
        )
        with pytest.raises(RanksDiverged, match=rf"rank {through} is through .*agree, round 1"):
            await agreeing
        with pytest.raises(RanksDiverged, match=rf"rank {through} is through \(call 3\).*asked for two more\(\)"):
            world.peers[other].called(call("two more"), (0, 1))
        await world.peers[other].close(PATIENCE)
        await closing


async def test_a_hub_waits_no_longer_than_its_grace():
    """Close has a budget; a rank that comes to it later finds that it is alone, and that is all."""
    async with ranks(2) as world:
        began = time.monotonic()
        await world.peers[0].close(0.2)
        assert 0.2 <= time.monotonic() - began < AT_ONCE
        async with asyncio.timeout(PATIENCE):
            await world.peers[1]._standing.farewell.wait()
        assert world.sinks[1].deaths == world.sinks[1].divergence == []
        with pytest.raises(RanksDiverged, match="rank 0 is through"):
            world.peers[1].called(call("later"), (0,))


async def test_a_replica_that_ends_sooner_takes_no_other_with_it():
    """Also that of rank 0: the others go on."""
    async with ranks(tensor=2, data=2) as world:
        await asyncio.gather(*(one.close(PATIENCE) for one in world.peers[:2]))
        for one in world.peers[2:]:
            one.called(call("add"), (0, 1))
        answer(world, 1, 0, 1)
        for sink in world.sinks[2:]:
            assert await sink.all_of(1, 2) == replies(1, 2)


async def test_closing_twice_is_once():
    """Also where nothing was opened."""
    world = RankWorld(RankLayout(2))
    for one in world.peers:
        await one.close(1.0)
        await one.close(1.0)


# What ranks ask each other.


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0), (1, 2), (0, 0), (2, 2)])
async def test_a_message_to_one_rank_is_answered_by_it(source, target):
    """Outside of the calls, and whatever they wait for."""
    async with ranks(3) as world:
        world.peers[0].called(call("stuck"), (0, 1, 2))
        world.peers[source].ask(target, 17, Ping())
        assert world.sinks[source].answers == {}
        found = await world.sinks[source].until(lambda sink: sink.answers.get(17))
        assert found == (target, (source, Ping()))
        assert world.peers[source].statistics().asked == 0


async def test_a_refusal_is_told_to_who_asked():
    """As what it is, where its type is known; and an answer that cannot travel is one."""
    async with ranks(2) as world:
        world.sinks[1].answer = lambda _, message, reply: reply.fail(Failure(f"no {type(message).__name__}"))
        world.peers[0].ask(1, 5, Ping())
        rank, error = await world.sinks[0].until(lambda sink: sink.refusals.get(5))
        assert (rank, isinstance(error, RemoteError)) == (1, True)
        assert "no Ping" in str(error)
        world.sinks[1].answer = lambda *given: given[2].resolve(value for value in "abc")
        world.peers[0].ask(1, 6, Ping())
        _, error = await world.sinks[0].until(lambda sink: sink.refusals.get(6))
        assert isinstance(error, MessageNotPortable)


async def test_a_rank_that_is_through_answers_nobody():
    """Whoever asks is told so."""
    async with ranks(3) as world:
        closing = asyncio.ensure_future(world.peers[2].close(PATIENCE))
        await closing
        world.peers[1].ask(2, 5, Ping())
        _, error = await world.sinks[1].until(lambda sink: sink.refusals.get(5))
        assert isinstance(error, PeerLost)


async def test_where_every_rank_is_can_be_asked():
    """For the error of a call that not all have made."""
    async with ranks(2) as world:
        everybody(world, call("add", 1))
        world.peers[0].called(call("add", 2), (0, 1))
        for one in reversed(world.peers):
            assert await one.whereabouts() == {0: "call 2: add(2)", 1: "call 1: add(1)"}


# What all have.


async def test_ranks_agree_on_what_all_of_them_have():
    """In the first rank's order; the n-th round of each belongs together, and calls go on meanwhile."""
    async with ranks(3) as world:
        first = [asyncio.ensure_future(world.peers[rank].agree(["b", "a", str(rank)])) for rank in (0, 1)]
        answer(world, everybody(world, call("add")))
        for sink in world.sinks:
            await sink.all_of(1, 3)
        assert not any(one.done() for one in first)
        lacking = {"0": [1, 2], "1": [0, 2], "c": [0, 1]}
        assert await world.peers[2].agree(["a", "b", "c"]) == (["b", "a"], lacking)
        assert await asyncio.gather(*first) == [(["b", "a"], lacking)] * 2
        second = await asyncio.gather(*(one.agree([]) for one in world.peers))
        assert second == [([], {})] * 3


async def test_one_round_at_a_time():
    """A second one would be another rank's first."""
    async with ranks(2) as world:
        waiting = asyncio.ensure_future(world.peers[0].agree(["a"]))
        await asyncio.sleep(0)
        with pytest.raises(ProtocolError, match="agree, round 1, is not over"):
            await world.peers[0].agree(["b"])
        assert await world.peers[1].agree(["a"]) == (["a"], {})
        assert await waiting == (["a"], {})


# Coming together.


async def test_everybody_sees_the_cards_of_all():
    """Those of all replicas, by rank."""
    world = RankWorld(RankLayout(2, 1, 3))
    try:
        assert await world.connect() == [[f"card {rank}" for rank in range(6)]] * 6
    finally:
        await world.close()


async def test_hellos_are_those_of_the_replica():
    """In rank order, once all workers are there."""
    world = RankWorld(RankLayout(2, 1, 2))
    try:
        await world.connect()
        found = await asyncio.gather(*(one.open(hello_of(rank)) for rank, one in enumerate(world.peers)))
        assert [[hello.rank for hello in hellos] for hellos in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    finally:
        await world.close()


async def test_ranks_that_do_not_come_are_named():
    """After the limit, by the hub; the others hear it from there."""
    world = RankWorld(RankLayout(4), timeout=1.5)
    try:
        some = [world.peers[rank].connect() for rank in (0, 2)]
        errors = await asyncio.gather(*some, return_exceptions=True)
        assert all(isinstance(error, RanksMissing) for error in errors)
        assert str(errors[0]) == (
            "ranks 1, 3 did not come to meet within 1.5 s: does the launcher run a process for each of them, and does "
            "it get to open the executor?"
        )
        assert str(pickle.loads(pickle.dumps(errors[0]))) == str(errors[0])
    finally:
        await world.close()


async def test_a_worker_that_does_not_come_is_named():
    """Its rank has met the others, and its model takes too long."""
    world = RankWorld(RankLayout(3), timeout=1.5)
    try:
        await world.connect()
        with pytest.raises(RanksMissing, match=r"ranks 0, 2 did not come to be ready within 1.5 s"):
            await world.peers[1].open(hello_of(1))
    finally:
        await world.close()


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
async def test_a_rank_whose_start_fails_fails_all_of_its_replica(failing):
    """They are told why, instead of waiting for its worker."""
    world = RankWorld(RankLayout(4))
    try:
        await world.connect()
        opening = [one.open(hello_of(rank)) for rank, one in enumerate(world.peers) if rank != failing]
        errors, _ = await asyncio.gather(
            asyncio.gather(*opening, return_exceptions=True),
            world.peers[failing].close(1.0, "ModelLoadError: no weights"),
        )
        for error in errors:
            assert isinstance(error, RanksMissing)
            assert str(error) == f"rank {failing} did not come to be ready: ModelLoadError: no weights"
    finally:
        await world.close()


@pytest.mark.parametrize(("cancelled", "data"), [(0, 1), (0, 2), (1, 2), (2, 2)])
async def test_a_start_that_was_cancelled_can_be_made_again(cancelled, data):
    """The others, which have met it already, begin anew with it, and none of them notices."""
    world = RankWorld(RankLayout(2, 1, data))
    late = 2 * data - 1
    try:
        first = [asyncio.ensure_future(one.connect("card")) for one in world.peers[:late]]
        async with asyncio.timeout(PATIENCE):
            while (hub := world.peers[0]._standing.hub) is None or hub.missing_cards != [data]:  # noqa: ASYNC110
                await asyncio.sleep(0)
        first[cancelled].cancel()
        with pytest.raises(asyncio.CancelledError):
            await first[cancelled]
        first[cancelled] = asyncio.ensure_future(world.peers[cancelled].connect("card"))
        found = await asyncio.gather(*first, world.peers[late].connect("card"))
        assert found == [["card"] * 2 * data] * 2 * data
    finally:
        await world.close()


async def test_a_world_can_be_opened_again_where_the_first_was():
    """The key in the store is the old one until the new hub has told its own."""
    first = RankWorld(RankLayout(2))
    await first.open()
    second = RankWorld(RankLayout(2))
    for one, again in zip(first.peers, second.peers, strict=True):
        again._standing._ways._store = one._standing._ways._store
    early = asyncio.ensure_future(second.peers[1].connect("card"))
    try:
        answer(first, everybody(first, call("add")))
        for sink in first.sinks:
            assert await sink.all_of(1, 2) == replies(1, 2)
        assert not early.done()
        assert await second.peers[0].connect("card") == ["card"] * 2
        assert await early == ["card"] * 2
    finally:
        await first.close()
        await second.close()
