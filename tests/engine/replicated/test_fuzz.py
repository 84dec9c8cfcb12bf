"""Random programs on ranks of random timing: the same calls in the same order, and the tokens of one engine alone."""

from __future__ import annotations

import asyncio
import random

import pytest

from aexec.errors import AexecError
from aexec.messages.request import SamplingParams

pytestmark = pytest.mark.anyio

SETTINGS = [{"async_scheduling": True}, {"async_scheduling": False}, {"prefix_caching": False}, {"max_num_seqs": 2}]


def program_of(seed):
    """What all ranks do: a list of (kind, number, ...)."""
    dice = random.Random(seed)
    kinds = ["run", "run", "run", "leave", "abort", "call", "pause", "samples", "cancel", "reset"]
    return [
        (dice.choice(kinds), number, dice.randrange(1, 30), dice.randrange(1, 9))
        for number in range(dice.randrange(3, 16))
    ]


class Act:
    """One step of a program on one rank; each returns what must be equal on all ranks."""

    def __init__(self, world, llm, number, length, count):
        self.world, self.llm, self.number, self.count, self.name = world, llm, number, count, f"r{number}"
        self.prompt = [60 + (number * 7 + place) % 9 for place in range(length)]

    def complete(self, **sampling):
        sampling = SamplingParams(**{"max_tokens": 3 + self.count, "seed": self.number, **sampling})
        return self.llm.complete(self.prompt, sampling, request_id=self.name, priority=self.count % 2)

    async def run(self):
        return (await self.complete()).token_ids

    async def samples(self):
        return [sample.token_ids for sample in (await self.complete(n=2)).samples]

    async def leave(self):
        tokens = []
        async for chunk in self.llm.generate(self.prompt, SamplingParams(max_tokens=60, seed=1), request_id=self.name):
            tokens += chunk.token_ids
            if len(tokens) >= self.count:
                break
        return tokens[: self.count]

    async def abort(self):
        running = asyncio.create_task(self.complete(max_tokens=60))
        await self.world.jitter()
        was_there, answer = await self.llm.abort(self.name), await running
        return was_there, answer.finish_reason, answer.token_ids

    async def cancel(self):
        running = asyncio.create_task(self.complete())
        await self.world.jitter()
        running.cancel()

    async def call(self):
        return await self.llm.collective_rpc(f"method{self.number}")

    async def pause(self):
        await self.llm.pause("finish" if self.count % 2 else "keep")
        await self.world.jitter()
        await self.llm.resume()

    async def reset(self):
        return await self.llm.reset_prefix_cache()


async def act(world, llm, kind, number, length, count):
    """Do one step, after a while."""
    for _ in range(count % 3):
        await world.jitter()
    return await getattr(Act(world, llm, number, length, count), kind)()


@pytest.mark.parametrize("seed", range(60))
async def test_random_programs_stay_in_lockstep(world_class, ranks, engine, seed):
    """Two or three ranks, one stage or two, with little room."""
    dice = random.Random(seed)
    stages, settings = dice.choice([1, 1, 2]), dict(dice.choice(SETTINGS))
    if stages == 2:
        settings.pop("async_scheduling", None)
    room = {"num_blocks": dice.choice([30, 90]), "block_size": 4}
    program = program_of(seed)
    world = world_class(
        2 if stages == 2 else dice.choice([2, 3]), seed, stages=stages, most_turns=dice.choice([2, 9, 40]), **room
    )
    async with ranks(world, max_num_batched_tokens=dice.choice([8, 64]), **settings) as llms:

        async def run(rank, llm):
            return await asyncio.gather(*(act(world, llm, *step) for step in program), return_exceptions=True)

        results = await asyncio.wait_for(world.on_all(llms, run), 15)
        left = [llm._frontend.driver._cell.actor for llm in llms]
        for driver in left:
            driver._scheduler._blocks.check_integrity()
    world.assert_alike()
    for ours in zip(*results, strict=True):
        kinds = [type(each) if isinstance(each, AexecError) else each for each in ours]
        assert kinds[1:] == kinds[:-1]
    async with engine(**room) as (alone, _):
        for step, result in zip(program, results[0], strict=True):
            if step[0] == "run" and not isinstance(result, AexecError):
                assert result == await act(world, alone, *step)
