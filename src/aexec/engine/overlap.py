"""How steps follow each other: the normal loop and the overlapped loop, side by side. Pure.

==================  ============================================  =========================================
..                  normal                                        overlapped (async scheduling)
==================  ============================================  =========================================
Steps in flight     one for each pipeline stage                   two, on one stage
A step runs         requests whose tokens are all known           those too whose last token is being sampled
Launched            behind the sampling of the one before         behind the sampling of the one before
A batch holds       its share, so that all stages have some       all that may run
A request has       one step in flight (or chunks of its prompt)  up to two; a token after its end is dropped
==================  ============================================  =========================================

Both give the same tokens: what a token depends on is the same. The overlapped loop hides the
driver's own time behind the model's, at the price of a step in vain when a stop is found.
"""

from __future__ import annotations

from typing import NamedTuple

from aexec.engine.inflight import InFlight
from aexec.errors import ConfigError

__all__ = ("NORMAL_LOOP", "AsyncScheduling", "Demand", "StepLoop", "choose_loop", "num_stages", "share")


class AsyncScheduling(NamedTuple):
    """Whether steps overlap, and why.

    Attributes:
        is_on: They do.
        reason: Why they do, or why not.
    """

    is_on: bool
    reason: str


class StepLoop(NamedTuple):
    """One of the two loops.

    Attributes:
        depth: Steps in flight at most.
        overlaps: It is the overlapped one.
        reason: Why it was chosen.
    """

    depth: int = 1
    overlaps: bool = False
    reason: str = "it was not asked for"

    @property
    def async_scheduling(self) -> AsyncScheduling:
        """For whoever wants to know."""
        return AsyncScheduling(self.overlaps, self.reason)

    def may_launch(self, in_flight: InFlight) -> bool:
        """Whether a step may be launched now.

        It goes behind the sampling of all before it, which wait for nothing but their bitmasks.
        Ranks do what they are told in that order: told later, the last stage would sample a step
        after the forward passes of all that were launched meanwhile, and its result would be late
        by as many. In the overlapped loop the step goes on with the tokens of that sampling.
        """
        return in_flight.num_free > 0 and in_flight.all_sampled


NORMAL_LOOP = StepLoop()
"""One step in flight."""


class Demand(NamedTuple):
    """What there is to run.

    Attributes:
        num_idle: Requests that could run now, those that may be admitted among them.
        num_all: These and those in flight.
    """

    num_idle: int
    num_all: int


def choose_loop(wanted: bool | None, *, stages: int, resolves_placeholders: bool) -> StepLoop:  # noqa: FBT001
    """The loop for one executor.

    Args:
        wanted: ``SchedulerConfig.async_scheduling``; None: the overlapped one where it is possible.
        stages: Of its pipeline.
        resolves_placeholders: All its model runners can go on with a token that only they know.

    Raises:
        ConfigError: The overlapped loop is wanted, and is not possible.
    """
    if wanted is False:
        return StepLoop(stages, overlaps=False, reason="async_scheduling=False")
    loop = _possible_loop(stages, resolves_placeholders=resolves_placeholders)
    if wanted and not loop.overlaps:
        raise ConfigError(
            f"async_scheduling is True and cannot be: {loop.reason}; leave it out (None: where that is possible)"
        )
    return loop


def _possible_loop(stages: int, *, resolves_placeholders: bool) -> StepLoop:
    if stages > 1:
        why = f"the first of {stages} pipeline stages would need tokens that only the last one has"
        return StepLoop(stages, overlaps=False, reason=f"{why}; {stages} steps are in flight as it is")
    if not resolves_placeholders:
        why = "the worker class does not say that it resolves placeholders (ModelInfo.resolves_placeholders)"
        return StepLoop(1, overlaps=False, reason=why)
    return StepLoop(2, overlaps=True, reason="one pipeline stage, and its model runners resolve placeholders")


def num_stages(world_size: int, output_rank: int) -> int:
    """Pipeline stages of an executor: its output rank is the first one of the last stage."""
    return world_size // (world_size - output_rank)


def share(demand: Demand, *, depth: int, num_free: int) -> int:
    """How many requests a step may take, so that the pipeline fills and all its steps are alike.

    Args:
        demand: What there is to run.
        depth: Steps that may be in flight.
        num_free: Those of them that are not.
    """
    return max(1, min(-(-demand.num_idle // num_free), -(-demand.num_all // depth)))
