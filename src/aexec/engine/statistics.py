"""The engine in numbers: what ``llm.statistics()`` returns."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from aexec.engine.blocks import BlockStatistics
from aexec.engine.grammar.statistics import GrammarStatistics
from aexec.engine.inflight import InFlightStatistics
from aexec.engine.overlap import AsyncScheduling
from aexec.engine.prefix import PrefixStatistics
from aexec.engine.recovery import RecoveryStatistics

__all__ = ("EngineStatistics", "SchedulerStatistics")


class SchedulerStatistics(NamedTuple):
    """The scheduler in numbers; steps, tokens, preemptions and ends count from the start.

    Attributes:
        num_running: Requests that hold blocks.
        num_waiting: Requests that wait, preempted ones among them.
        num_steps: Batches that were scheduled.
        num_scheduled_tokens: Tokens in them.
        num_preemptions: How often a request had to give its blocks back.
        num_finished: Requests that ended, in whatever way.
        blocks: The block pool.
        prefix: The prefix cache.
    """

    num_running: int
    num_waiting: int
    num_steps: int
    num_scheduled_tokens: int
    num_preemptions: int
    num_finished: int
    blocks: BlockStatistics
    prefix: PrefixStatistics = PrefixStatistics()


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """All parts of an engine at one moment, between two messages of its driver.

    What is asked for most has a name of its own here: ``statistics.num_running`` is
    ``statistics.scheduler.num_running``.

    Attributes:
        scheduler: Requests, and blocks of the KV cache.
        steps: The pipeline, and its bubble.
        recovery: Crashes of the workers.
        grammars: Grammars of structured output, and their bitmasks.
        connector: The KV connector, as in ``OffloadStatistics``; None without one.
        num_streams: Requests that somebody reads or may read.
        async_scheduling: Whether a step is launched before the tokens of the last one are back, and why.
        held_by: Why no step is launched, as in ``pause``; empty: nothing holds them.
        is_draining: True: no new requests are taken.
    """

    scheduler: SchedulerStatistics
    steps: InFlightStatistics
    recovery: RecoveryStatistics = RecoveryStatistics()
    grammars: GrammarStatistics = GrammarStatistics()
    connector: Any = None
    num_streams: int = 0
    async_scheduling: AsyncScheduling = AsyncScheduling(is_on=False, reason="")
    held_by: tuple[str, ...] = ()
    is_draining: bool = False

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return self.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait, preempted ones among them."""
        return self.scheduler.num_waiting

    @property
    def num_steps(self) -> int:
        """Batches that were scheduled."""
        return self.scheduler.num_steps

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens in them."""
        return self.scheduler.num_scheduled_tokens

    @property
    def num_preemptions(self) -> int:
        """How often a request had to give its blocks back."""
        return self.scheduler.num_preemptions

    @property
    def num_finished(self) -> int:
        """Requests that ended, in whatever way."""
        return self.scheduler.num_finished

    @property
    def blocks(self) -> BlockStatistics:
        """The block pool."""
        return self.scheduler.blocks

    @property
    def prefix(self) -> PrefixStatistics:
        """The prefix cache."""
        return self.scheduler.prefix
