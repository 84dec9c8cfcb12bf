"""What benches share: rounds of rival sides, their medians and ranges, and goals."""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

__all__ = ("AsyncSide", "Goal", "Side", "latencies_of", "machine", "rate_name", "rounded", "spread")


class Side(Protocol):
    """One of those that are measured in turns."""

    async def latencies(self, number: int) -> list[float]:
        """Microseconds of ``number`` round trips, one after the other."""
        ...

    async def rates(self, callers: int, number: int) -> dict[str, float]:
        """Round trips per second, in all, by the way in which ``callers`` are made."""
        ...


class AsyncSide:
    """Round trips that are awaited.

    Args:
        ask: One round trip.
    """

    def __init__(self, ask: Callable[[], Awaitable[object]]) -> None:
        self.ask = ask

    async def latencies(self, number: int) -> list[float]:
        """Microseconds of ``number`` round trips, one after the other."""
        return await latencies_of(self.ask, number)

    async def rates(self, callers: int, number: int) -> dict[str, float]:
        """Each caller is a task; and, with one caller that has as many asks under way, gathers."""
        rates = {rate_name(callers): await self._rate(callers, number)}
        if callers > 1:
            rates[f"per_s_{callers}_in_flight"] = await self._rate_in_flight(callers, number)
        return rates

    async def _rate(self, callers: int, number: int) -> float:
        async def call() -> None:
            for _ in range(number // callers):
                await self.ask()

        start = perf_counter()
        await asyncio.gather(*[call() for _ in range(callers)])
        return number / (perf_counter() - start)

    async def _rate_in_flight(self, width: int, number: int) -> float:
        start = perf_counter()
        for _ in range(number // width):
            await asyncio.gather(*[self.ask() for _ in range(width)])
        return number / (perf_counter() - start)


def rate_name(callers: int) -> str:
    """What the rate of so many callers is called."""
    return f"per_s_{callers}_caller{'s' if callers > 1 else ''}"


async def latencies_of(ask: Callable[[], Awaitable[object]], number: int) -> list[float]:
    """Microseconds of round trips, one after the other."""
    taken: list[float] = []
    for _ in range(number):
        start = perf_counter()
        await ask()
        taken.append((perf_counter() - start) * 1e6)
    return taken


def spread(values: Sequence[float]) -> dict[str, Any]:
    """The median of several rounds, and the least and the greatest."""
    return {"median": statistics.median(values), "range": [min(values), max(values)]}


@dataclass(frozen=True)
class Goal:
    """What a figure has to reach.

    Attributes:
        what: The figure, in words.
        figure: What was measured; None: it was not.
        at_least: The figure may not be below it.
        at_most: The figure may not be above it.
    """

    what: str
    figure: float | None
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_met(self) -> bool | None:
        """True when it is reached; None when nothing was measured."""
        if self.figure is None:
            return None
        return not (
            (self.at_least is not None and self.figure < self.at_least)
            or (self.at_most is not None and self.figure > self.at_most)
        )

    def as_json(self) -> dict[str, Any]:
        """As it is printed."""
        bound = {"at_least": self.at_least} if self.at_least is not None else {"at_most": self.at_most}
        return {"what": self.what, "figure": self.figure, **bound, "met": self.is_met}


def machine(packages: Iterable[str] = ()) -> dict[str, Any]:
    """What the figures were measured on, with the versions of ``packages``."""
    import importlib.metadata

    versions = {name: importlib.metadata.version(name) for name in packages}
    load = os.getloadavg()[0]
    return {"python": platform.python_version(), "cpus": os.cpu_count(), "load": load, "versions": versions}


def rounded(figures: Any) -> Any:
    """Three significant decimals are more than a machine can tell apart."""
    if isinstance(figures, Mapping):
        return {name: rounded(value) for name, value in figures.items()}
    if isinstance(figures, list):
        return [rounded(value) for value in figures]
    return round(figures, 3) if isinstance(figures, float) else figures
