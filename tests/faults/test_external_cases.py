"""Field cases on the ranks of a launcher that no other test of ``external_launcher`` is about.

One program runs most of them, one after the other, and ends without closing its last executor.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launched import Ended, RankProcesses

from aexec import ExecutorConfig, open_executor
from aexec.testing.workers import ProbeWorker

PROGRAM = """
import json, random
from mine import Mine
from aexec import LLM, SamplingParams
from aexec.errors import ExecutorClosed, WrongLoop
from aexec.testing.call_checks import CALL_CHECKS
from aexec.testing.life_checks import a_death_ends_all_waiters_at_once, a_start_that_fails_raises_the_cause
from aexec.testing.step_checks import STEP_CHECKS

def handlers():
    return [signal.getsignal(number) for number in signal.valid_signals()]

class Callbacks:
    # What the loop computes at a time: the longest, in seconds of its thread, and which it was.
    def __init__(self):
        self.longest, self.which, self.plain = 0.0, "", asyncio.Handle._run
    def __enter__(self):
        def run(handle):
            what, began = handle._callback, time.thread_time()
            self.plain(handle)
            took = time.thread_time() - began
            if took > self.longest:
                self.longest, self.which = took, getattr(what, "__qualname__", type(what).__name__)
        asyncio.Handle._run = run
        return self
    def __exit__(self, *_):
        asyncio.Handle._run = self.plain

async def large():
    async with make() as executor:
        lengths = []
        async def call(data, times):
            for _ in range(times):
                lengths.append([len(value) for value in await executor.collective_rpc("echo", (data,))])
        with Callbacks() as several:
            await asyncio.gather(*(call(bytes(5_000_000), 5) for _ in range(4)))
        with Callbacks() as one:
            await call(bytes(50_000_000), 2)
        return [several.longest, several.which], [one.longest, one.which], lengths

async def facade():
    loop = asyncio.get_running_loop()
    before = loop, type(loop).run_until_complete
    with LLM("dummy", executor=ByFolder, tensor_parallel_size=SIZE) as llm:
        (done,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert before == (asyncio.get_running_loop(), type(loop).run_until_complete)
    return list(done.token_ids)

async def foreign_loop():
    async with make() as executor:
        def elsewhere():
            try:
                asyncio.run(executor.collective_rpc("echo", (1,)))
            except WrongLoop as error:
                return type(error).__name__
        return await asyncio.to_thread(elsewhere), await executor.collective_rpc("echo", (1,))

async def in_a_thread():
    def use():
        async def main():
            async with make() as executor:
                assert handlers() == before
                return await executor.collective_rpc("echo", (1,))
        return asyncio.run(main())
    before = handlers()
    answer = await asyncio.to_thread(use)
    assert handlers() == before
    return answer

async def closing():
    dice, kinds = random.Random(RANK), set()
    for _ in range(4):
        executor = await make()
        calls = [executor.collective_rpc("async_echo" if n % 2 else "echo", (n,)) for n in range(50)]
        calls = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(dice.uniform(0.0, 0.02))
        closes = [asyncio.ensure_future(executor.close()) for _ in range(10)]
        for number, result in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
            kinds.add("its answer" if result == [number] * SIZE else type(result).__name__)
        assert await asyncio.wait_for(asyncio.gather(*closes), 10.0) == [None] * 10
        try:
            await executor.collective_rpc("echo", (1,))
        except ExecutorClosed:
            pass
    return sorted(kinds)

async def environment():
    async with make() as executor:
        found = await executor.collective_rpc(lambda worker: dict(os.environ))
        sent = executor.describe().environment
        return found[RANK] == dict(os.environ), [one["RANK"] for one in found], dict(sent)

def make_mine(worker_cls, **settings):
    return make(worker_cls, **{"backend": "mine:Mine"} | settings)

async def own_executor():
    async with make_mine(ProbeWorker) as executor:
        assert executor.is_replicated
    for check in (*STEP_CHECKS, *CALL_CHECKS[:3], a_start_that_fails_raises_the_cause, a_death_ends_all_waiters_at_once):
        await asyncio.wait_for(check(make_mine), 20.0)
    return "all kept"

found = {}
for case in (large, facade, foreign_loop, in_a_thread, closing, environment, own_executor):
    try:
        found[case.__name__] = asyncio.run(case())
    except Exception as error:
        found[case.__name__] = repr(error)
say(json.dumps(found))

async def forget():
    executor = await make()
    await executor.collective_rpc("echo", (1,))
    say("used")
    if RANK:
        sys.exit(3)

asyncio.run(forget())
"""

MINE = """
import os, pathlib, asyncio
from aexec.executor.external.group import ExternalGroup

class Files:
    def __init__(self, folder, rank):
        self.folder, self.rank = pathlib.Path(folder), rank

    async def tell(self, key, value, timeout):
        (self.folder / f"mine {self.rank}").write_bytes(value)
        (self.folder / f"mine {self.rank}").rename(self.folder / "mine")

    async def learn(self, key, timeout):
        while not (self.folder / "mine").exists():
            await asyncio.sleep(0.01)
        return (self.folder / "mine").read_bytes()

    def close(self):
        pass

class Mine(ExternalGroup):
    def store(self):
        return Files(os.environ["MEETING"], os.environ["RANK"])
"""

HEAD = """
async def main():
    async with make() as executor:
        heard, told = [], asyncio.Event()

        async def hear(error):
            await asyncio.sleep(0)
            heard.append("async")

        def fail(error):
            heard.append("raises")
            raise OSError("mine")

        def end(error):
            heard.append(type(error).__name__)
            told.set()

        for callback in (fail, hear, end):
            executor.add_failure_callback(callback)
        await executor.collective_rpc("echo", (1,))
        say("ready")
        try:
            await (told.wait() if RANK == 2 else executor.collective_rpc("block", (60.0,), ranks=[0, 1]))
        finally:
            while len(heard) < 3:
                await asyncio.sleep(0.01)
            say(*sorted(heard))
        sys.exit(4)

asyncio.run(main())
"""


class Told(NamedTuple):
    """What the ranks of the program have found, case by case, and how they have ended."""

    found: list[dict[str, Any]]
    used_at: float
    ended: list[Ended]

    def both(self, case: str) -> list[Any]:
        """What each rank has found."""
        return [found[case] for found in self.found]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Of two ranks, run once."""
    folder = Path(tmp_path_factory.mktemp("ranks"))
    (folder / "mine.py").write_text(MINE)
    ranks = RankProcesses(PROGRAM, 2, folder, PYTHONWARNINGS="always::ResourceWarning")
    try:
        lines = ranks.lines()
        assert all(lines), [ranks.finish(rank).errors for rank in (0, 1)]
        assert ranks.lines() == ["used"] * 2
        used_at = time.monotonic()
        return Told([json.loads(line) for line in lines], used_at, [ranks.finish(rank) for rank in (0, 1)])
    finally:
        ranks.end()


@pytest.mark.timeout(120)
def test_large_messages_do_not_hold_up_a_ranks_loop(told):
    """G09: of 5 MB, several at once, and of 50 MB, to all ranks and from each to all: nothing takes the loop long."""
    for several, one, lengths in told.both("large"):
        assert several[0] < 0.04, several
        assert one[0] < 0.2, one  # what comes as ``bytes`` is copied once, on the loop
        assert lengths == [[5_000_000] * 2] * 20 + [[50_000_000] * 2] * 2


@pytest.mark.timeout(120)
def test_the_blocking_facade_works_on_ranks_where_a_loop_runs(told):
    """G25: inside ``async def``, on every rank, with the same tokens; the loop is not patched."""
    first, second = told.both("facade")
    assert first == second
    assert len(first) == 4


@pytest.mark.timeout(120)
def test_a_foreign_loop_is_refused_on_ranks(told):
    """G26: at once, before the call counts: the next one is everybody's next."""
    assert told.both("foreign_loop") == [["WrongLoop", [1, 1]]] * 2


@pytest.mark.timeout(120)
def test_ranks_run_in_threads_of_their_processes(told):
    """G20: on a loop of a thread, with the signal handlers as they were, before, during and after."""
    assert told.both("in_a_thread") == [[1, 1]] * 2


@pytest.mark.timeout(120)
def test_closing_races_with_calls_on_ranks(told):
    """G34: ten closes and fifty calls, on each rank at another moment: an answer or ``ExecutorClosed``, nothing else."""
    for kinds in told.both("closing"):
        assert set(kinds) <= {"its answer", "ExecutorClosed"}


@pytest.mark.timeout(120)
def test_a_ranks_environment_is_its_processs(told):
    """G39: the launcher has made it; nothing is sent, and each rank keeps its own."""
    assert told.both("environment") == [[True, ["0", "1"], {}]] * 2


@pytest.mark.timeout(120)
def test_an_own_executor_of_ranks_keeps_the_same_promises(told):
    """G58: given as ``module:Class``; checks of the contract run on all ranks at once."""
    assert told.both("own_executor") == ["all kept"] * 2


@pytest.mark.timeout(120)
def test_ranks_that_forget_to_close_end(told):
    """G27: soon after the last line, with a ResourceWarning, each with its own exit code."""
    for rank, ended in enumerate(told.ended):
        assert ended.code == 3 * rank
        assert ended.at - told.used_at < 8.0
        assert "ResourceWarning" in ended.errors
        assert "Traceback" not in ended.errors


@pytest.mark.timeout(90)
def test_ranks_that_have_lost_rank_0_end(launch):
    """G48, G62, G63: killed while another computes and a third is idle; all callbacks run, and each has a code of its own."""
    ranks = launch(HEAD, 3)
    assert ranks.lines() == ["ready"] * 3
    began = ranks.kill(0, signal.SIGKILL)
    assert [ranks.line(rank) for rank in (1, 2)] == ["WorkerDied async raises"] * 2
    assert time.monotonic() - began < 5.0
    ended = [ranks.finish(rank) for rank in (1, 2)]
    assert [one.code for one in ended] == [1, 4]
    assert all(one.at - began < 8.0 for one in ended)
    assert "WorkerDied: rank 0" in ended[0].errors


@pytest.mark.anyio
async def test_a_launchers_backend_is_used_for_a_single_rank_too(monkeypatch):
    """G42: asked for by name it is never silently another."""
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 1}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    async with open_executor(ExecutorConfig(backend="external_launcher", worker_cls=ProbeWorker)) as executor:
        assert executor.is_replicated
        assert "external_launcher" in repr(executor)
        assert await executor.collective_rpc("echo", (1,)) == [1]
