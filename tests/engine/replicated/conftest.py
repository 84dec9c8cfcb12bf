"""Several engines in one process, each on an executor of its own that makes the same calls as the others.

The ranks agree over memory. Whatever one waits for comes after a random number of turns of the
loop, other on each rank, so that no two runs of their loops are alike.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import pytest

from aexec.config import CacheConfig, ModelConfig
from aexec.errors import RanksDiverged
from aexec.executor.external.lockstep import result_of
from aexec.executor.lifecycle import ExecutorState
from aexec.messages.batch import ModelRunnerOutput
from aexec.messages.lifecycle import HealthReport, RankHealth
from aexec.messages.step import ExecuteModel, ForwardLaunched, StepResult
from aexec.model.dummy.runner import DummyRunner
from aexec.observe.hub import EventHub


class World:
    """What the ranks have in common.

    Args:
        size: Ranks.
        seed: Of the timing.
        stages: Pipeline stages.
        most_turns: That something takes at most.
    """

    def __init__(self, size=2, seed=0, *, stages=1, most_turns=12, model="dummy", **cache):
        self.size, self.output_rank = size, size - size // stages
        self.random, self.most_turns = random.Random(seed), most_turns
        self.rounds, self.calls = [], []
        self.ranks = [RankExecutor(self, rank, model, cache) for rank in range(size)]

    async def jitter(self):
        """Some turns of the loop."""
        for _ in range(self.random.randrange(self.most_turns)):
            await asyncio.sleep(0)

    def called(self, rank, what):
        """A rank makes its next call; returns what waits until all have."""
        mine = self.ranks[rank]
        number, mine.num_calls = mine.num_calls, mine.num_calls + 1
        if number == len(self.calls):
            self.calls.append(SimpleNamespace(what=what, num=0, all_in=asyncio.get_running_loop().create_future()))
        call = self.calls[number]
        if call.what != what:
            raise RanksDiverged(rank, number + 1, None, {0: call.what, rank: what}, "they differ")
        call.num += 1
        if call.num == self.size:
            call.all_in.set_result(None)
        return call.all_in

    async def on_all(self, llms, program):
        """What ``program`` returns on each rank, begun at another time on each."""

        async def run(rank, llm):
            await self.jitter()
            return await program(rank, llm)

        return await asyncio.gather(*(run(rank, llm) for rank, llm in enumerate(llms)))

    def assert_alike(self):
        """All ranks have made the same calls to the last one, and the same rounds."""
        assert [rank.num_calls for rank in self.ranks] == [len(self.calls)] * self.size
        assert [rank.num_rounds for rank in self.ranks] == [len(self.rounds)] * self.size


class RankExecutor:
    """One rank's executor: runs the whole model itself, and answers when all ranks have asked."""

    is_replicated, generation, state = True, 1, ExecutorState.READY

    def __init__(self, world, rank, model, cache):
        self.world, self.rank = world, rank
        self.world_size, self.output_rank = world.size, world.output_rank
        self.config = SimpleNamespace(slow_call=10.0, distributed_timeout=300.0)
        self.runner = DummyRunner(ModelConfig(model=model), CacheConfig(**cache))
        self.runner.load_model()
        self.runner.initialize_cache(self.runner.determine_available_memory())
        self.num_calls = self.num_rounds = self.last_step = 0
        self.said = []
        self.news, self.tell_failure = EventHub(), []
        self.fails = {}  # by step
        self._last = None

    async def agree(self, keys, timeout=None):
        world, number = self.world, self.num_rounds
        self.num_rounds += 1
        self.said.append(list(keys))
        if number == len(world.rounds):
            world.rounds.append(SimpleNamespace(keys={}, answer=asyncio.get_running_loop().create_future()))
        round_ = world.rounds[number]
        round_.keys[self.rank] = list(keys)
        if len(round_.keys) == world.size:
            round_.answer.set_result(result_of([round_.keys[rank] for rank in range(world.size)]))
        answer = await asyncio.shield(round_.answer)
        await world.jitter()
        return answer

    async def _in_line(self, what, work):
        """Do ``work`` after all that was asked before, once all ranks have asked for it."""
        before, done = self._last, asyncio.get_running_loop().create_future()
        self._last = done
        all_in = self.world.called(self.rank, what)
        try:
            if before is not None:
                await asyncio.shield(before)
            await asyncio.shield(all_in)
            await self.world.jitter()
            return work()
        finally:
            done.set_result(None)

    async def collective_rpc(self, method, args=(), kwargs=None, timeout=None, ranks=None, reply_rank=None):
        name = method if isinstance(method, str) else method.__name__

        def work():
            if name == "model_info":
                return [self.runner.info()] * self.world_size
            if name == "_draw":
                return [4711] * self.world_size
            return [(name, *args)] * self.world_size

        return await self._in_line(("call", name, args), work)

    async def check_health(self, timeout=1.0):
        ranks = [RankHealth(rank=0, state="alive", phase="idle", step=self.last_step, age=0.0)]
        return HealthReport(generation=1, ranks=ranks)

    async def execute_model(self, step: ExecuteModel):
        what, self.last_step = ("execute", step.step, step.num_tokens, step.payload), step.step

        def work():
            self.runner.execute_model(step.payload)
            return StepResult(step.step, ModelRunnerOutput())

        running = asyncio.ensure_future(self._in_line(what, work))
        if step.num_tokens == 0:
            return await running
        await self.world.jitter()
        return ForwardLaunched(step.step)

    async def sample_tokens(self, step_id, grammar=None):
        rows = None if grammar is None else tuple(grammar.request_ids)

        def work():
            output = self.runner.sample_tokens(grammar)
            if step_id in self.fails:
                raise self.fails[step_id]
            return StepResult(step_id, output)

        return await self._in_line(("sample", step_id, rows), work)

    def events(self):
        return self.news.listen()

    def add_failure_callback(self, callback):
        self.tell_failure.append(callback)

    async def close(self):
        pass


@pytest.fixture
def world_class():
    return World


@pytest.fixture
def ranks(engine_class):
    """What opens an engine on each rank of a world, and runs a program on all of them at once."""

    @asynccontextmanager
    async def opened(world, **settings):
        async with AsyncExitStack() as stack:
            llms = [engine_class("dummy", executor=executor, **settings) for executor in world.ranks]
            await asyncio.gather(*(llm.open() for llm in llms))

            async def close():
                await asyncio.gather(*(llm.aclose() for llm in llms))

            stack.push_async_callback(close)
            yield llms

    return opened
