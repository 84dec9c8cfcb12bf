"""What becomes of a grammar and a bitmask whose request has ended meanwhile."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from aexec import SamplingParams, StructuredOutput
from aexec.engine.grammar.base import GrammarError
from aexec.engine.grammar.following import RequestGrammar
from aexec.engine.grammar.manager import GrammarManager
from aexec.errors import RequestTimeout

pytestmark = pytest.mark.anyio

FORM = SamplingParams(max_tokens=4, structured=StructuredOutput(regex="abc"))


class Endless:
    """A compiler that comes to no end."""

    def __init__(self):
        self.asked, self.cancelled = anyio.Event(), anyio.Event()

    async def compile(self, request):
        del request
        self.asked.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.cancelled.set()


class Broken:
    """A grammar without a mask."""

    is_terminated = False

    def accept(self, token_ids):
        return len(token_ids)

    def fill(self, row):
        raise GrammarError("too many states")


@pytest.fixture
def anyio_backend():
    """The engine is asyncio's."""
    return "asyncio"


@pytest.mark.parametrize("how", ["timeout", "abort", "left"])
async def test_a_request_takes_its_compilation_with_it(engine, monkeypatch, how):
    """However it ends."""
    endless = Endless()
    monkeypatch.setattr(GrammarManager, "compile", endless.compile)
    async with engine() as (llm, _):
        timeout = 0.05 if how == "timeout" else None
        asking = asyncio.ensure_future(llm.complete("go", FORM, request_id="a", timeout=timeout))
        with anyio.fail_after(10):
            await endless.asked.wait()
            if how == "abort":
                assert await llm.abort("a")
                assert (await asking).finish_reason == "abort"
            elif how == "left":
                asking.cancel()
            else:
                with pytest.raises(RequestTimeout):
                    await asking
            await endless.cancelled.wait()


@pytest.mark.parametrize("error", [None, MemoryError("no room")], ids=["a row", "all rows"])
async def test_a_mask_that_fails_fails_no_later_request_of_the_same_id(engine, monkeypatch, error):
    """Its own request was aborted while the mask was made, and another one has the id by now."""
    made, gate, mask = anyio.Event(), anyio.Event(), GrammarManager.mask

    async def compiled(manager, request):
        del manager, request
        return RequestGrammar(Broken())

    async def held(manager, request_ids):
        masks = await mask(manager, request_ids)
        made.set()
        await gate.wait()
        if error is not None:
            raise error
        return masks

    monkeypatch.setattr(GrammarManager, "compile", compiled)
    monkeypatch.setattr(GrammarManager, "mask", held)
    async with engine() as (llm, _):
        with anyio.fail_after(10):
            first = asyncio.ensure_future(llm.complete("go", FORM, request_id="a"))
            await made.wait()
            assert await llm.abort("a")
            assert (await first).finish_reason == "abort"
            second = asyncio.ensure_future(llm.complete("go", SamplingParams(max_tokens=4), request_id="a"))
            while not (await llm.statistics()).num_streams:  # noqa: ASYNC110 - a request in a mailbox has no event
                await asyncio.sleep(0)
            gate.set()
            assert len((await second).token_ids) == 4
