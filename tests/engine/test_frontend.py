"""The caller's end of a driver: what it was told before its end is seen."""

from __future__ import annotations

import pytest

from aexec.errors import InvalidRequest
from aexec.messages.request import SamplingParams

pytestmark = pytest.mark.anyio


async def leave_a_stream(llm):
    stream = llm.generate("Hello", SamplingParams(max_tokens=1000))
    await anext(stream)
    await stream.aclose()


async def be_refused(llm):
    with pytest.raises(InvalidRequest, match="token id"):
        await llm.complete([10**9])


@pytest.mark.parametrize("last", [leave_a_stream, be_refused])
async def test_what_was_left_just_before_the_engine_closes_is_no_dead_letter(engine, last, caplog):
    """The abort of such a request reaches the driver, so that nobody is warned of its loss."""
    async with engine() as (llm, _):
        await last(llm)
    assert [record.getMessage() for record in caplog.records if "dead letter" in record.getMessage()] == []
