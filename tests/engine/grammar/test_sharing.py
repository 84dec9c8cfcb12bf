from __future__ import annotations

import asyncio

import anyio
import pytest

from aexec.engine.grammar.sharing import SharedWork

pytestmark = pytest.mark.anyio


class Bench:
    """Work that a test lets end."""

    def __init__(self):
        self.shared = SharedWork(self.work, lambda key, value: self.taken.append((key, value)))
        self.begun, self.cancelled, self.taken = [], [], []
        self.gate, self.error = anyio.Event(), None

    async def work(self, key):
        self.begun.append(key)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(key)
            await asyncio.sleep(0)  # it takes a while to end
            raise
        if self.error is not None:
            raise self.error
        return key * 2

    def ask(self, key):
        return asyncio.ensure_future(self.shared.get(key))


@pytest.fixture
def anyio_backend():
    """The engine is asyncio's."""
    return "asyncio"


@pytest.fixture
async def bench():
    """Nothing under way; nothing is left under way."""
    bench = Bench()
    yield bench
    await bench.shared.aclose()


async def turns(number=5):
    """Let others run."""
    for _ in range(number):
        await asyncio.sleep(0)


async def test_who_asks_for_the_same_at_once_shares_it(bench):
    """It is begun once, and taken once."""
    asking = [bench.ask("a"), bench.ask("a"), bench.ask("b")]
    await turns()
    assert (len(bench.shared), "a" in bench.shared, "c" in bench.shared) == (2, True, False)
    assert repr(bench.shared) == "<SharedWork: 2 under way for 3, 0 given up>"
    bench.gate.set()
    assert await asyncio.gather(*asking) == ["aa", "aa", "bb"]
    assert (bench.begun, bench.taken, len(bench.shared)) == (["a", "b"], [("a", "aa"), ("b", "bb")], 0)


async def test_it_ends_with_the_last_who_waits(bench):
    """And not before."""
    first, second = bench.ask("a"), bench.ask("a")
    await turns()
    first.cancel()
    await turns()
    assert not bench.cancelled
    second.cancel()
    await turns()
    assert (bench.cancelled, len(bench.shared), bench.taken) == (["a"], 0, [])


async def test_who_asks_after_it_was_given_up_begins_anew(bench):
    """Though the old work has not come to its end yet."""
    asking = bench.ask("a")
    await turns()
    asking.cancel()
    await turns(1)
    again = bench.ask("a")
    await turns()
    bench.gate.set()
    assert await again == "aa"
    assert (bench.begun, bench.cancelled) == (["a", "a"], ["a"])


async def test_an_error_goes_to_all_who_wait_and_is_not_kept(bench):
    """The next one tries again."""
    bench.error = MemoryError("no room")
    bench.gate.set()
    for each in await asyncio.gather(bench.ask("a"), bench.ask("a"), return_exceptions=True):
        assert each is bench.error
    bench.error = None
    assert await bench.shared.get("a") == "aa"


async def test_closing_gives_up_all_and_waits_for_its_end(bench):
    """Those who wait are cancelled."""
    asking = [bench.ask("a"), bench.ask("b")]
    await turns()
    await bench.shared.aclose()
    assert bench.cancelled == ["a", "b"]
    assert repr(bench.shared) == "<SharedWork: 0 under way for 0, 0 given up>"
    await turns()
    assert all(each.cancelled() for each in asking)
