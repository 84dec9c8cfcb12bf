"""The same actor in Pykka and in xoscar, which only the bench's environment has.

Pykka's actors are threads. Its callers are threads too, each of which waits for its own
reply; one thread that sends many messages and then waits for all the replies is the other
way to use it, and is measured apart. xoscar's ref is the one that ``create_actor`` returns,
for an actor in the pool of this very process.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from time import perf_counter

from measure import AsyncSide, Side, rate_name

__all__ = ("PEERS", "open_peers")

PEERS = ("pykka", "xoscar")


@contextlib.asynccontextmanager
async def open_peers(callers: int) -> AsyncIterator[dict[str, Side]]:
    """The peers that are installed, ready to be asked by up to ``callers``."""
    async with contextlib.AsyncExitStack() as stack:
        peers: dict[str, Side] = {}
        if find_spec("pykka") is not None:
            peers["pykka"] = stack.enter_context(contextlib.closing(PykkaSide(callers)))
        if find_spec("xoscar") is not None:
            peers["xoscar"] = await stack.enter_async_context(open_xoscar())
        yield peers


class PykkaSide:
    """Round trips to a thread's actor.

    Args:
        callers: Threads that may ask at a time.
    """

    def __init__(self, callers: int) -> None:
        import pykka

        class Counter(pykka.ThreadingActor):
            """As little as an actor can do."""

            def __init__(self) -> None:
                super().__init__()
                self.count = 0

            def on_receive(self, message: int) -> int:
                """Count."""
                self.count += message
                return self.count

        self.ref = Counter.start()
        self.threads = ThreadPoolExecutor(callers)

    def close(self) -> None:
        """End all threads."""
        self.ref.stop()
        self.threads.shutdown()

    async def latencies(self, number: int) -> list[float]:
        """Microseconds of ``number`` round trips, one after the other."""
        taken: list[float] = []
        for _ in range(number):
            start = perf_counter()
            self.ref.ask(1)
            taken.append((perf_counter() - start) * 1e6)
        return taken

    async def rates(self, callers: int, number: int) -> dict[str, float]:
        """Each caller is a thread; and, with one thread that has as many asks under way, futures."""
        if callers == 1:
            return {rate_name(1): self._rate(number)}
        return {
            rate_name(callers): self._rate_of_threads(callers, number),
            f"per_s_{callers}_in_flight": self._rate_in_flight(callers, number),
        }

    def _rate(self, number: int) -> float:
        start = perf_counter()
        self._ask(number)
        return number / (perf_counter() - start)

    def _rate_of_threads(self, callers: int, number: int) -> float:
        start = perf_counter()
        for done in [self.threads.submit(self._ask, number // callers) for _ in range(callers)]:
            done.result()
        return number / (perf_counter() - start)

    def _rate_in_flight(self, width: int, number: int) -> float:
        start = perf_counter()
        for _ in range(number // width):
            for reply in [self.ref.ask(1, block=False) for _ in range(width)]:
                reply.get()
        return number / (perf_counter() - start)

    def _ask(self, number: int) -> None:
        for _ in range(number):
            self.ref.ask(1)


@contextlib.asynccontextmanager
async def open_xoscar() -> AsyncIterator[Side]:
    """Round trips to an actor in this process's pool."""
    import xoscar

    class Counter(xoscar.Actor):
        """As little as an actor can do."""

        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def add(self, by: int) -> int:
            """Count."""
            self.count += by
            return self.count

    pool = await xoscar.create_actor_pool("127.0.0.1", n_process=0)
    try:
        ref = await xoscar.create_actor(Counter, address=pool.external_address)
        yield AsyncSide(lambda: ref.add(1))
    finally:
        await pool.stop()
