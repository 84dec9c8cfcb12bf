"""What goes wrong with a step, a grammar or a rank goes wrong on all ranks alike."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aexec.engine.grammar.base import GrammarError
from aexec.engine.grammar.following import RequestGrammar
from aexec.engine.grammar.manager import GrammarManager
from aexec.errors import CallTimeout, InvalidRequest, RanksDiverged, RequestFailed
from aexec.messages.request import SamplingParams
from aexec.messages.structured import StructuredOutput

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
CHOICE = SamplingParams(max_tokens=12, temperature=0.0, structured=StructuredOutput(regex="abc"))


class Letters:
    """Allows the letters of a text, one after the other, and the end after them; may fail at one of them."""

    def __init__(self, text=b"abc", bad=None):
        self.text, self.place, self.bad = text, 0, bad

    @property
    def is_terminated(self):
        return self.place >= len(self.text)

    def fill(self, row):
        if self.place == self.bad:
            raise GrammarError("it is stuck")
        token = 256 if self.is_terminated else self.text[self.place]
        row[token // 32] |= np.int32(1 << token % 32)

    def accept(self, token_ids):
        for count, token in enumerate(token_ids):
            if self.is_terminated or token != self.text[self.place]:
                return count
            self.place += 1
        return len(token_ids)

    def rollback(self, num_tokens):
        self.place -= num_tokens


@pytest.fixture
def compiled(monkeypatch):
    """What a rank's compiler does: sets the grammar, or what it raises, for the n-th compilation on all ranks together."""
    made = []

    async def compiling(manager, request):
        for _ in range(7 * len(made) % 11):
            await asyncio.sleep(0)
        outcome = compiling.outcomes[len(made) % len(compiling.outcomes)]
        made.append(request.request_id)
        if isinstance(outcome, Exception):
            raise outcome
        return RequestGrammar(outcome())

    compiling.outcomes = [Letters]
    monkeypatch.setattr(GrammarManager, "compile", compiling)
    monkeypatch.setattr(GrammarManager, "check", lambda manager, structured: None)
    return compiling


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("seed", range(4))
async def test_structured_requests_run_in_lockstep(world_class, ranks, compiled, seed, stages):
    """A request counts as there when its grammar is, on all ranks; steps and masks are equal."""
    world = world_class(2, seed, stages=stages)
    async with ranks(world) as llms:

        async def program(rank, llm):
            async def one(number):
                await world.jitter()
                return await llm.complete([65 + number], CHOICE if number % 2 else GREEDY, request_id=f"r{number}")

            return [answer.token_ids for answer in await asyncio.gather(*map(one, range(6)))]

        first, second = await world.on_all(llms, program)
    assert first == second
    assert [first[1][:3], first[3][:3]] == [tuple(b"abc")] * 2
    world.assert_alike()


async def test_a_grammar_that_one_rank_cannot_make_fails_its_request_on_all(world_class, ranks, compiled):
    """That rank says why, the others that another one does; the next request runs."""
    world = world_class(2, 1)
    compiled.outcomes = [Letters, InvalidRequest("it took too long")]
    async with ranks(world) as llms:

        async def program(rank, llm):
            results = await asyncio.gather(
                llm.complete([65], CHOICE, request_id="bad"), llm.complete([66], GREEDY), return_exceptions=True
            )
            return results[0], results[1].token_ids

        results = await world.on_all(llms, program)
    errors = sorted(str(error) for error, _ in results)
    assert errors[0] == "it took too long"
    assert errors[1] == "the grammar of request bad could not be compiled on another rank, which says why"
    assert results[0][1] == results[1][1]
    world.assert_alike()


@pytest.mark.parametrize("seed", range(4))
async def test_a_mask_that_cannot_be_made_fails_its_request_at_the_same_step(world_class, ranks, compiled, seed):
    """The step is sampled without it, and the request ends when the step's outcome is taken."""
    world = world_class(2, seed)
    compiled.outcomes = [lambda: Letters(bad=1)]
    async with ranks(world) as llms:

        async def program(rank, llm):
            results = await asyncio.gather(
                llm.complete([65], CHOICE, request_id="bad"), llm.complete([66], GREEDY), return_exceptions=True
            )
            return str(results[0]), type(results[0]), results[1].token_ids

        first, second = await world.on_all(llms, program)
    assert first == second
    assert first[1] is RequestFailed
    world.assert_alike()


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("seed", range(4))
async def test_a_step_that_fails_ends_the_same_requests_on_all_ranks(world_class, ranks, seed, stages):
    """The engine lives, and goes on in lockstep."""
    world = world_class(2, seed, stages=stages)
    for executor in world.ranks:
        executor.fails[5] = ValueError("no such luck")
    async with ranks(world) as llms:

        async def program(rank, llm):
            async def one(number):
                await world.jitter()
                return await llm.complete([65 + number], GREEDY, request_id=f"r{number}")

            results = await asyncio.gather(*map(one, range(6)), return_exceptions=True)
            after = await llm.complete([99], GREEDY, request_id="after")
            return [str(r) if isinstance(r, ValueError) else r.token_ids for r in results], after.token_ids

        first, second = await world.on_all(llms, program)
    assert first == second
    assert "no such luck" in first[0]
    world.assert_alike()


@pytest.mark.parametrize(
    "error", [RanksDiverged(1, 7, 5, {}, "other step"), CallTimeout("sample_tokens", 1.0, started=True)]
)
async def test_what_other_ranks_may_not_know_ends_the_engine(world_class, ranks, error):
    """All that waits ends with it, and so does what comes later."""
    world = world_class(2, 0)
    for executor in world.ranks:
        executor.fails[4] = error
        if isinstance(error, RanksDiverged):
            executor.fails[5] = error
    async with ranks(world) as llms:

        async def program(rank, llm):
            tasks = [llm.complete([65 + number], GREEDY, request_id=f"r{number}") for number in range(3)]
            lone = llm.complete([99], GREEDY, request_id=f"only on {rank}")
            results = await asyncio.gather(*tasks, lone, return_exceptions=True)
            late = await asyncio.gather(llm.complete([99], GREEDY), return_exceptions=True)
            await asyncio.wait_for(asyncio.gather(llm.pause(), llm.resume(), llm.abort("r0"), llm.drain()), 5)
            await asyncio.wait_for(llm.collective_rpc("after"), 5)
            return [type(result) for result in (*results, *late)]

        if isinstance(error, RanksDiverged):
            for executor in world.ranks:
                executor.agree = _lost(error)
        first, second = await world.on_all(llms, program)
    assert first == second == [type(error)] * 5


def _lost(error):
    async def agree(keys, timeout=None):
        raise error

    return agree
