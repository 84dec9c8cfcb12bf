"""Facts about workers and executors: what events, health reports and dumps are made of."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ("GroupRestarted", "HealthReport", "RankHealth", "RankInfo", "SlowCall", "WorkerStarted")

RankState = Literal["starting", "ready", "stuck", "dead", "stopped"]


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, as the executor sees it now.

    Attributes:
        rank: Global rank.
        pid: Process id.
        node: Name of its node.
        phase: What it is doing, as in ``weights``, ``idle`` or ``execute_model``.
        state: Whether it can be counted on.
    """

    rank: int
    pid: int
    node: str
    phase: str
    state: RankState


class RankHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of one rank's liveness lane.

    Attributes:
        rank: Global rank.
        state: ``alive``, ``stuck`` (the process answers nothing, or one call has been
            running past ``ExecutorConfig.step_timeout``) or ``dead``.
        phase: What its compute thread is doing.
        step: The last step it began; None before the first.
        age: Seconds since that phase began.
    """

    rank: int
    state: Literal["alive", "stuck", "dead"]
    phase: str
    step: int | None
    age: float


class HealthReport(msgspec.Struct, frozen=True, kw_only=True):
    """Health of a worker group; ``bool(report)`` is :attr:`healthy`."""

    generation: int
    ranks: list[RankHealth]

    @property
    def healthy(self) -> bool:
        """True when every rank is alive."""
        return all(rank.state == "alive" for rank in self.ranks)

    def __bool__(self) -> bool:
        """Healthy or not."""
        return self.healthy


class WorkerStarted(msgspec.Struct, frozen=True, kw_only=True):
    """A worker is ready."""

    rank: int
    pid: int
    generation: int


class GroupRestarted(msgspec.Struct, frozen=True, kw_only=True):
    """The group was rebuilt under a new generation after ``reason``, in ``seconds``."""

    generation: int
    reason: str
    seconds: float


class SlowCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call has been pending past ``ExecutorConfig.slow_call``.

    Attributes:
        method: What was called.
        age: Seconds since it was sent.
        missing: Ranks that have not answered, with the phase of each.
    """

    method: str
    age: float
    missing: dict[int, str]
