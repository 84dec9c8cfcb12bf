"""Executors of several ranks, all in this process: each has its own, and real lines to the others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import signal
import sys
import threading
import time

import numpy as np
import pytest

from aexec import ExecuteModel, ExecutorConfig, ParallelConfig, Restart, open_executor
from aexec.errors import (
    CallTimeout,
    ConfigError,
    ExecutorClosed,
    RanksDiverged,
    RanksMissing,
    RemoteError,
    StepStateError,
    WorkerDied,
)
from aexec.executor.external.group import ExternalGroup
from aexec.executor.external.launcher import Launched
from aexec.executor.lifecycle import ExecutorState
from aexec.messages.batch import GrammarOutput
from aexec.testing.expect import all_are_in
from aexec.testing.workers import ProbeError, ProbeWorker, SleepProbeWorker, StepProbeWorker

pytestmark = pytest.mark.anyio

SOON = 2.0


class MemoryStore:
    """What the launcher's store is to processes."""

    problem = ""

    def __init__(self):
        self.values, self.changed = {}, asyncio.Event()

    async def tell(self, key, value, timeout):
        self.values[key] = value
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    async def learn(self, key, timeout):
        async with asyncio.timeout(timeout):
            while key not in self.values:
                await self.changed.wait()
        return self.values[key]

    def close(self):
        pass


def backend_of(rank, size, store):
    """The backend as the process of one rank has it."""

    class OneRank(ExternalGroup):
        @classmethod
        def place(cls):
            return Launched(
                launcher="torchrun", rank=rank, world_size=size, local_rank=rank, local_world_size=size,
                master_addr="127.0.0.1", master_port=29500, has_store=True,
            )  # fmt: skip

        def store(self):
            return store

    return OneRank


class Ranks:
    """The executors of all ranks."""

    def __init__(self, executors):
        self.executors = executors

    def __iter__(self):
        return iter(self.executors)

    def __getitem__(self, rank):
        return self.executors[rank]

    async def all(self, make, *, errors=False):
        """What each rank makes of it; all of them at once."""
        return await asyncio.gather(*map(make, self.executors), return_exceptions=errors)

    async def rpc(self, *args, **kwargs):
        return await self.all(lambda one: one.collective_rpc(*args, **kwargs))


def configs(worker_cls, size, layout, each, settings):
    store = MemoryStore()
    for rank in range(size):
        yield ExecutorConfig(
            backend=backend_of(rank, size, store),
            worker_cls=worker_cls,
            parallel=layout or ParallelConfig(tensor_parallel_size=size),
            **{"start_timeout": 20.0, **settings, **each.get(rank, {})},
        )


@contextlib.asynccontextmanager
async def ranks(worker_cls=ProbeWorker, size=2, layout=None, each=None, **settings):
    """Open an executor for each rank, and close them together."""
    openings = [open_executor(config) for config in configs(worker_cls, size, layout, each or {}, settings)]
    opened = await asyncio.gather(*openings, return_exceptions=True)
    failures = [one for one in opened if isinstance(one, BaseException)]
    group = Ranks([one for one in opened if not isinstance(one, BaseException)])
    try:
        if failures:
            raise ExceptionGroup("not all could be opened", failures)
        yield group
    finally:
        await group.all(lambda one: one.close())


async def test_each_process_has_all_replies():
    """EXT-02: in rank order, whoever asks; what is for one rank runs there, and is answered everywhere."""
    async with ranks(ProbeWorker, size=3) as group:
        for executor in group:
            assert (executor.world_size, executor.output_rank, executor.is_replicated) == (3, 0, True)
        assert await group.rpc("echo", (7,)) == [[7, 7, 7]] * 3
        places = await group.rpc("place")
        assert [place[0] for place in places[2]] == [0, 1, 2]
        assert await group.rpc("place", ranks=[1]) == [[(1, 3, 1, 0, 1)]] * 3
        assert await group.rpc("place", reply_rank=2) == [[(2, 3, 2, 0, 1)]] * 3
        assert await group.rpc("async_echo", (1,)) == [[1, 1, 1]] * 3
        assert [[rank.state for rank in executor.ranks] for executor in group] == [["ready"] * 3] * 3


async def test_the_least_memory_of_all_ranks_counts():
    """EXT-03: each rank is told the same, which the poorest of them can hold."""
    async with ranks(ProbeWorker) as group:
        for logs in await group.rpc("read_log"):
            assert [log[4] for log in logs] == ["initialize_cache 1000"] * 2


async def test_eight_ranks_with_two_in_each_replica_are_four_replicas():
    """G53: each replica is a group of its own, with calls of its own."""
    async with ranks(ProbeWorker, size=8, layout=ParallelConfig(2)) as group:
        await asyncio.gather(*(group[rank].collective_rpc("note", (rank // 2,)) for rank in range(8)))
        logs = await group.rpc("read_log")
        assert [one[0][-1] for one in logs] == [0, 0, 1, 1, 2, 2, 3, 3]
        placed = await group.rpc(lambda worker: (worker.context.dp_rank, worker.context.world_rank))
        assert placed[5] == [(2, 4), (2, 5)]


async def test_where_each_rank_is_can_be_read_on_every_rank(monkeypatch):
    """G40: node, process and device, of the reader's own replica."""
    monkeypatch.setattr("aexec.executor.external.group.device_of", lambda launched: f"cuda:{launched.local_rank}")
    async with ranks(ProbeWorker, size=4, layout=ParallelConfig(2)) as group:
        here = (platform.node(), os.getpid())
        assert [one.describe().places for one in group] == [
            ((0, *here, "cuda:0"), (1, *here, "cuda:1")), ((0, *here, "cuda:0"), (1, *here, "cuda:1")),
            ((0, *here, "cuda:2"), (1, *here, "cuda:3")), ((0, *here, "cuda:2"), (1, *here, "cuda:3")),
        ]  # fmt: skip


async def test_steps_have_the_output_ranks_result_on_every_rank():
    """Two phases, a bitmask of one's own, and a step without tokens."""
    async with ranks(StepProbeWorker, layout=ParallelConfig(1, 2)) as group:
        mask = GrammarOutput(request_ids=["r"], bitmask=np.array([[5]], dtype=np.int32))
        await group.all(lambda one: one.execute_model(ExecuteModel(1)))
        assert [tuple(result.output) for result in await group.all(lambda one: one.sample_tokens(1, mask))] == [
            (1, 1, [[5]])
        ] * 2
        whole = await group.all(lambda one: one.execute_model(ExecuteModel(2, {"value": "done"}, 0)))
        assert [result.output for result in whole] == ["done"] * 2


async def test_an_error_of_any_rank_reaches_all_processes_at_once():
    """G06: while another rank is in a collective, that is, in something that does not end."""
    async with ranks(ProbeWorker) as group:
        began = time.monotonic()
        errors = await group.all(lambda one: one.collective_rpc("fail_or_block", (1, 1.8)), errors=True)
        assert time.monotonic() - began < 1.7
        for error in errors:
            assert isinstance(error, ValueError)
            assert isinstance(error, RemoteError)
            assert (error.rank, error.text) == (1, "bad value on rank 1")
            assert "rank 0: no answer" in "\n".join(error.__notes__)
        assert await group.rpc("echo", (1,)) == [[1, 1]] * 2


async def test_another_argument_is_an_error_on_every_rank():
    """G53: not a hang; it names rank, call, and what each side asked for, and then nothing goes on."""
    async with ranks(ProbeWorker) as group:
        began = time.monotonic()
        calls = [executor.collective_rpc("echo", (rank,)) for rank, executor in enumerate(group)]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert time.monotonic() - began < SOON
        for error in errors:
            assert isinstance(error, RanksDiverged), error
            assert "echo(0)" in str(error)
            assert "echo(1)" in str(error)
        assert [executor.state for executor in group] == [ExecutorState.FAILED] * 2
        with pytest.raises(RanksDiverged):
            await group[0].collective_rpc("echo", (1,))


async def test_another_step_names_rank_and_step():
    """G53, G54: the payload counts, and so does a step that is left out."""
    async with ranks(StepProbeWorker) as group:
        await group.all(lambda one: one.execute_model(ExecuteModel(1)))
        await group.all(lambda one: one.sample_tokens(1))
        await asyncio.gather(*(one.execute_model(ExecuteModel(2, {"value": n})) for n, one in enumerate(group)))
        began = time.monotonic()
        errors = await group.all(lambda one: one.sample_tokens(2), errors=True)
        assert time.monotonic() - began < SOON
        for error in errors:
            assert isinstance(error, RanksDiverged), error
            assert (error.step, error.rank) == (2, 1)


async def test_a_rank_that_skips_a_step_is_found_at_its_next():
    """G54: counters are compared, so a drift is an error and no hang."""
    async with ranks(StepProbeWorker, step_timeout=10.0) as group:
        await group[0].execute_model(ExecuteModel(1))
        await group.all(lambda one: one.execute_model(ExecuteModel(2)))
        errors = await group.all(lambda one: one.sample_tokens(2), errors=True)
        for error in errors:
            assert isinstance(error, RanksDiverged), error
            assert (error.rank, error.call, error.step) == (1, 6, 1)  # the start's five hooks come before
            assert "rank 1 has skipped 1 call" in str(error)


async def test_without_the_check_each_rank_is_trusted():
    """Nothing is compared: whoever asks for something else gets it."""
    async with ranks(ProbeWorker, divergence_check=False) as group:
        calls = [executor.collective_rpc("echo", (rank,)) for rank, executor in enumerate(group)]
        assert await asyncio.gather(*calls) == [[0, 1]] * 2


async def test_weights_may_be_another_part_on_each_rank():
    """Co-located training: each rank gives its own tensors; everything else has to be alike."""
    async with ranks(SleepProbeWorker) as group:
        calls = [executor.collective_rpc("update_weights", (rank + 3,)) for rank, executor in enumerate(group)]
        assert await asyncio.gather(*calls) == [[3, 4]] * 2


async def test_a_rank_that_never_comes_is_the_calls_own_deadline():
    """G02: and the error says at which call that rank is, and what it does."""
    async with ranks(ProbeWorker) as group:
        await group.rpc("echo", (1,))
        with pytest.raises(CallTimeout) as caught:
            await group[0].collective_rpc("echo", (2,), timeout=0.2)
        notes = "\n".join(caught.value.__notes__)
        assert "rank 1: has made call 6 last" in notes


async def test_calls_that_are_taken_in_another_order_of_answers_are_the_same_calls():
    """An ``async def`` method passes plain ones that wait, and how long they do differs from rank to rank."""
    async with ranks(ProbeWorker) as group:

        async def use(executor):
            blocked = asyncio.ensure_future(executor.collective_rpc("block", (0.1,)))
            queued = asyncio.ensure_future(executor.collective_rpc("echo", ("queued",)))
            if executor is group[1]:
                await asyncio.sleep(0.15)
            else:
                await asyncio.sleep(0)
            beside = await executor.collective_rpc("async_echo", ("beside",))
            return await blocked, await queued, beside

        assert await group.all(use) == [([0, 1], ["queued"] * 2, ["beside"] * 2)] * 2


async def test_a_call_that_one_rank_takes_back_is_an_error_on_the_others():
    """A caller that leaves on one rank alone: nobody waits for an answer that will not come."""
    async with ranks(ProbeWorker, rpc_timeout=10.0) as group:
        ahead = asyncio.ensure_future(group.rpc("hold"))
        await all_are_in(group[0], "hold")
        calls = [asyncio.ensure_future(executor.collective_rpc("note", ("here",))) for executor in group]
        await asyncio.sleep(0)
        calls[1].cancel()
        await group.rpc("release")
        with pytest.raises(Exception, match="its caller is gone, or its time was up before its turn came"):
            await calls[0]
        await ahead


async def test_a_worker_that_ends_is_a_death_everywhere():
    """Promise 3: rank and exit code are known to all processes."""
    async with ranks(ProbeWorker) as group:
        errors = await group.all(lambda one: one.collective_rpc("end", (7, 1)), errors=True)
        for error in errors:
            assert isinstance(error, WorkerDied), error
            assert (error.rank, error.exit_code) == (1, 7)
        assert [executor.state for executor in group] == [ExecutorState.FAILED] * 2


async def test_a_death_ends_all_replicas():
    """And those of another replica are told whose rank it was."""
    async with ranks(ProbeWorker, size=4, layout=ParallelConfig(2)) as group:
        waiting = [asyncio.ensure_future(group[rank].collective_rpc("async_block", (30.0,))) for rank in (0, 1)]
        await asyncio.sleep(0.05)
        dying = [asyncio.ensure_future(group[rank].collective_rpc("end", (7, 1))) for rank in (2, 3)]
        async with asyncio.timeout(SOON):
            errors = await asyncio.gather(*waiting, *dying, return_exceptions=True)
        assert {type(error) for error in errors} == {WorkerDied}
        assert [error.rank for error in errors] == [3, 3, 1, 1]
        assert "it is rank 1 of replica 1, not of 0" in str(errors[0])


async def test_a_rank_that_leaves_early_fails_what_the_others_want_of_it():
    """Pending and later calls, each naming the rank that is through."""
    async with ranks(ProbeWorker, rpc_timeout=10.0) as group:
        pending = asyncio.ensure_future(group[0].collective_rpc("echo", (1,)))
        await asyncio.sleep(0.05)
        closing = asyncio.ensure_future(group[1].close())
        async with asyncio.timeout(SOON + 2.0):
            with pytest.raises(RanksDiverged, match="rank 1"):
                await pending
            with pytest.raises(RanksDiverged, match="rank 1"):
                await group[0].collective_rpc("echo", (2,))
        await group[0].close()
        await closing


async def test_a_rank_that_does_not_come_is_named_before_the_limit_of_the_start():
    """That limit knows what this rank is at, and not whom it waits for."""
    config = next(configs(ProbeWorker, 2, None, {}, {"start_timeout": 3.0}))
    with pytest.raises(RanksMissing, match="rank 1 did not come to meet"):
        await open_executor(config)


async def test_a_start_that_fails_on_one_rank_fails_on_all():
    """G32: the others are told who gave up, and why, and do not wait until their own time is up."""
    began = time.monotonic()
    with pytest.raises(ExceptionGroup) as caught:
        async with ranks(ProbeWorker, each={1: {"worker_kwargs": {"fail_in": "__init__"}}}):
            pass
    assert time.monotonic() - began < 10.0
    first, second = caught.value.exceptions
    assert isinstance(second, ProbeError)
    assert isinstance(first, RanksMissing)
    assert "__init__ was told to fail" in str(first)


async def test_ranks_with_other_settings_do_not_start():
    """G53: before any worker is made; all are told."""
    with pytest.raises(ExceptionGroup) as caught:
        async with ranks(ProbeWorker, each={1: {"divergence_check": False}}):
            pass
    assert all(isinstance(error, ConfigError) for error in caught.value.exceptions)
    assert "divergence_check=False" in str(caught.value.exceptions[0])


async def test_what_all_have_is_agreed_upon():
    """In the order of the first rank, with who lacks the rest; an empty round is one as well."""
    async with ranks(ProbeWorker) as group:
        said = (["a", "b", "c"], ["c", "a", "x"])
        found = await asyncio.gather(*(one.agree(keys) for one, keys in zip(group, said, strict=True)))
        assert found == [(["a", "c"], {"b": [1], "x": [0]})] * 2
        assert await group.all(lambda one: one.agree(())) == [([], {})] * 2


async def test_a_round_that_is_late_is_the_end_of_the_group():
    """It cannot be left out: the other rank's next round would be another one's."""
    async with ranks(ProbeWorker) as group:
        with pytest.raises(CallTimeout, match="agree"):
            await group[0].agree(["a"], timeout=0.2)
        assert group[0].state is ExecutorState.FAILED


async def test_health_and_stacks_are_asked_of_each_rank():
    """G69: not counted as calls: any rank may ask when it likes."""
    async with ranks(ProbeWorker) as group:
        busy = asyncio.ensure_future(group.rpc("hold"))
        await all_are_in(group[1], "hold")
        stacks = await group[0].stacks()
        assert all("in hold" in stacks[rank] for rank in (0, 1))
        await group.rpc("release")
        await busy
        assert await group[0].check_health()


async def test_closing_is_common_and_leaves_nothing():
    """All pending calls end, later ones are refused, and the threads are gone."""
    before = set(threading.enumerate())
    async with ranks(ProbeWorker) as group:
        pending = [asyncio.ensure_future(executor.collective_rpc("async_block", (30.0,))) for executor in group]
        await asyncio.sleep(0.05)
    for result in await asyncio.gather(*pending, return_exceptions=True):
        assert isinstance(result, ExecutorClosed)
    assert {thread.name for thread in set(threading.enumerate()) - before if "aexec" in thread.name} == set()


async def test_a_duplicate_step_is_refused_alike():
    """The launch fails on all ranks; its sampling is sent on all of them, whoever knows already."""
    async with ranks(StepProbeWorker) as group:
        await group.all(lambda one: one.execute_model(ExecuteModel(4)))
        await group.all(lambda one: one.execute_model(ExecuteModel(4)), errors=True)
        results = await group.all(lambda one: one.sample_tokens(4), errors=True)
        assert {type(result) for result in results} <= {StepStateError} or [r.step for r in results] == [4, 4]
        assert await group.rpc("echo", (1,)) == [[1, 1]] * 2


async def test_a_slow_call_names_the_rank_that_is_missing():
    """G01: on every rank, with its state; the one that has answered is not blamed."""
    async with ranks(ProbeWorker, slow_call=0.1) as group:
        events = [executor.events() for executor in group]
        call = asyncio.ensure_future(group.rpc("hold", (1,)))
        for heard in events:
            event = await asyncio.wait_for(anext(heard), SOON)
            while event.answered != [0]:  # a machine that stands still holds up rank 0 as well: until the next report
                event = await asyncio.wait_for(anext(heard), SOON)
            assert (event.method, event.answered, event.missing) == ("hold", [0], {1: "hold"})
        await group.rpc("release", ranks=[1])
        await call


async def test_many_starts_at_once_have_ports_of_their_own():
    """G49: a place to meet is bound first and then announced, so nobody else gets it."""

    async def one():
        async with ranks(ProbeWorker) as group:
            (methods,) = {tuple(reply) for reply in await group.rpc(_meeting_place)}
            return methods[0]

    for _ in range(3):
        places = await asyncio.gather(*(one() for _ in range(6)))
        assert len(set(places)) == 6


async def test_stages_see_the_same_steps_in_the_same_order():
    """G60: whatever each of them takes, and whoever leaves: the two halves of a step keep their pairing."""
    async with ranks(StepProbeWorker, size=3, layout=ParallelConfig(1, 3), max_concurrent_steps=4) as group:

        async def drive(executor):
            results = []
            for first in range(1, 13, 3):
                for step in range(first, first + 3):
                    await executor.execute_model(ExecuteModel(step, {"seconds": 0.001 * (step % 4)}))
                samplings = [asyncio.ensure_future(executor.sample_tokens(step)) for step in range(first, first + 3)]
                await asyncio.sleep(0)
                samplings[1].cancel()
                results += [await samplings[0], await samplings[2]]
            return [(result.step, result.output[:2]) for result in results]

        wanted = [(step, (step, 2)) for step in range(1, 13) if step % 3 != 2]
        assert await group.all(drive) == [wanted] * 3
        logs = (await group.rpc("read_log"))[0]
        steps = [[entry[1] for entry in log if entry[0] == "execute"] for log in logs]
        assert steps == [list(range(1, 13))] * 3


async def test_a_late_answer_is_nobodys():
    """G05: after calls that have passed their limit, each call has its own answer, on every rank."""
    async with ranks(ProbeWorker) as group:

        async def drive(executor):
            found = []
            for number in range(3):
                with pytest.raises(CallTimeout):
                    await executor.collective_rpc("hold", (None, number), timeout=0.2)
                await executor.collective_rpc("release")
                found.append(await executor.collective_rpc("echo", (number,)))
            return found

        assert await group.all(drive) == [[[number] * 2 for number in range(3)]] * 2


async def test_it_starts_no_process_and_touches_no_signal(monkeypatch):
    """G53: never spawns; the launcher's signals are its own."""

    def never(*args, **kwargs):
        raise AssertionError("it was to start nothing")

    for module, name in ((os, "fork"), (os, "posix_spawn"), (signal, "signal"), (signal, "set_wakeup_fd")):
        monkeypatch.setattr(module, name, never)
    monkeypatch.setattr("subprocess.Popen.__init__", never)
    async with ranks(ProbeWorker) as group:
        pids = await group.rpc(lambda _: os.getpid())
        assert pids == [[os.getpid()] * 2] * 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"on_failure": Restart()}, r"makes no processes that it could make again: .*torchrun --max-restarts"),
        ({"env": {"A": "1"}}, r"env is .*leave it out; set it in os.environ"),
        ({"env_deny": ["A"]}, "env_deny is .*the launcher says what this process has"),
        ({"start_method": "spawn"}, "start_method is 'spawn'.*the launcher has started the processes"),
        ({"worker_output": "log"}, "worker_output is 'log'"),
        ({"preload": ["json"]}, "preload is"),
        ({"spin": 0.1}, "spin is"),
        ({"arena_bytes": 1 << 20}, "arena_bytes is 1048576.*send less at once where the 1 GiB"),
        ({"parallel": ParallelConfig(3)}, "torchrun has started 2 ranks"),
    ],
)
async def test_settings_of_other_backends_are_refused(settings, said):
    """Before anything is started, with what to do instead; the environment is this process's own, as it is (G39)."""
    settings = {"parallel": ParallelConfig(2)} | settings
    with pytest.raises(ConfigError, match=said):
        await open_executor(ExecutorConfig(backend=backend_of(0, 2, MemoryStore()), worker_cls=ProbeWorker, **settings))


async def test_a_process_that_no_launcher_has_started_is_told_how_to(monkeypatch):
    """EXT-01: all that is missing, and no KeyError."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set here"):
        await open_executor(ExecutorConfig(backend="external_launcher", worker_cls=ProbeWorker))


async def test_worker_init_and_extensions_run_in_this_process():
    """G57: they are known to the worker of each rank."""
    sys.modules.pop("colorsys", None)

    class More:
        def more(self):
            return "more"

    done = []
    async with ranks(ProbeWorker, worker_init=[lambda: done.append(1)], worker_extension=[More]) as group:
        assert await group.rpc("more") == [["more"] * 2] * 2
        assert done == [1, 1]


async def test_one_rank_alone_needs_nobody():
    """As with one process on the launcher's command line."""
    async with ranks(ProbeWorker, size=1) as group:
        assert await group.rpc("echo", (1,)) == [[1]]
        assert await group[0].agree(["a"]) == (["a"], {})


def _meeting_place(worker):
    return worker.context.distributed_init_method
