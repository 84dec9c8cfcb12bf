"""What becomes of an actor that fails: the decisions, pure.

The parent of an actor is its supervisor. It says how with a :class:`Supervision` and,
failure by failure, with ``on_child_failed``. Time and randomness come as arguments; who
acts on the decisions is ``ward.Ward``. The states that they lead to are in
``lifecycle.TRANSITIONS``.
"""

from __future__ import annotations

import enum
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar, get_args

import tenacity
from tenacity.wait import WaitBaseT, wait_base

from aexec.errors import ConfigError

__all__ = (
    "UNSUPERVISED",
    "Backoff",
    "Budget",
    "Directive",
    "Strategy",
    "Supervision",
    "Trouble",
    "affected",
    "choose",
    "delay_before",
)

T = TypeVar("T")

Strategy = Literal["one_for_one", "one_for_all", "rest_for_one"]


class Directive(enum.Enum):
    """What a supervisor does about a failure."""

    RESUME = "the message is lost, and the actor goes on as it is"
    RESTART = "a new actor takes its place, with the same address and mailbox"
    STOP = "the actor ends"
    ESCALATE = "the actor ends, and its parent has failed in its stead"


class Trouble(enum.Enum):
    """What has failed."""

    MESSAGE = "the handler of a tell raised"
    TASK = "a task of its own raised"
    CHILD = "a child's failure was escalated to it"
    START = "it could not start again"


UNSUPERVISED: dict[Trouble, Directive] = {
    Trouble.MESSAGE: Directive.RESUME,
    Trouble.TASK: Directive.STOP,
    Trouble.CHILD: Directive.STOP,
    Trouble.START: Directive.STOP,
}


class Backoff(wait_base):
    """How long to wait before a restart: doubled each time, with a random part on top.

    It is one of tenacity's wait strategies, adds up with others, and may be replaced by
    any other one.

    Args:
        initial: Seconds before the first restart.
        maximum: Most seconds, the random part left out.
        jitter: Most seconds that are added at random, so that actors that failed together
            do not all come back together.
        random: Gives a number from 0 to 1.

    Raises:
        ConfigError: A number of seconds is negative or not finite.
    """

    def __init__(
        self,
        initial: float = 0.1,
        maximum: float = 10.0,
        jitter: float = 0.1,
        *,
        random: Callable[[], float] = random.random,
    ) -> None:
        if not all(seconds >= 0 and math.isfinite(seconds) for seconds in (initial, maximum, jitter)):
            raise ConfigError(
                f"Backoff has initial={initial!r}, maximum={maximum!r} and jitter={jitter!r}: expected seconds, 0 or more"
            )
        self.initial, self.maximum, self.jitter = initial, maximum, jitter
        self._wait = tenacity.wait_exponential(multiplier=initial, max=maximum)
        self._random = random

    def __repr__(self) -> str:
        return f"Backoff(initial={self.initial:g}, maximum={self.maximum:g}, jitter={self.jitter:g})"

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        """Seconds before the restart that ``retry_state.attempt_number`` counts, from 1."""
        return self._wait(retry_state) + self.jitter * self._random()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Supervision:
    """How failing actors are dealt with; actors under the same object are one group.

    Attributes:
        strategy: Who is restarted or stopped with the one that failed. ``one_for_one``:
            nobody. ``one_for_all``: all of the group. ``rest_for_one``: those of the group
            that were spawned after it.
        max_restarts: Restarts of one actor within the window before its failure is final.
        within: The window, seconds.
        backoff: Seconds before a restart: any wait strategy of tenacity's.
        directive: What is done about a failure unless ``on_child_failed`` says otherwise.
        exhausted: What is done when the restarts are used up.

    Raises:
        ConfigError: A value means nothing.
    """

    strategy: Strategy = "one_for_one"
    max_restarts: int = 3
    within: float = 60.0
    backoff: WaitBaseT = field(default_factory=Backoff)
    directive: Directive = Directive.RESTART
    exhausted: Literal[Directive.STOP, Directive.ESCALATE] = Directive.ESCALATE

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        if self.strategy not in get_args(Strategy):
            raise ConfigError(f"strategy is {self.strategy!r}: expected one of {', '.join(get_args(Strategy))}")
        if self.max_restarts < 0 or not self.within > 0:
            raise ConfigError(
                f"max_restarts is {self.max_restarts} and within {self.within}: expected 0 or more, and seconds above 0"
            )
        if not callable(self.backoff):
            raise ConfigError(
                f"backoff is {self.backoff!r}: expected Backoff(...), or another of tenacity's wait strategies"
            )
        if not isinstance(self.directive, Directive):  # pyright: ignore[reportUnnecessaryIsInstance] - as of its users
            raise ConfigError(f"directive is {self.directive!r}: expected a Directive, as Directive.RESTART")
        if self.exhausted not in {Directive.STOP, Directive.ESCALATE}:
            raise ConfigError(f"exhausted is {self.exhausted}: expected Directive.STOP or Directive.ESCALATE")


def choose(trouble: Trouble, wanted: Directive | None, supervision: Supervision | None) -> Directive:
    """What to do about a failure.

    Args:
        trouble: What has failed.
        wanted: What ``on_child_failed`` said; None: nothing in particular.
        supervision: What was declared; None: nothing.
    """
    if wanted is None:
        wanted = UNSUPERVISED[trouble] if supervision is None else supervision.directive
    if trouble is Trouble.START and wanted is Directive.RESUME:
        return Directive.STOP  # there is nothing that could go on
    return wanted


def affected(strategy: Strategy, group: Sequence[T], failed: T) -> list[T]:
    """Those of a group, in the order they were spawned, who share the fate of one of them."""
    if strategy == "one_for_one" or failed not in group:
        return [failed]
    return list(group if strategy == "one_for_all" else group[group.index(failed) :])


def delay_before(wait: WaitBaseT, attempt: int, error: BaseException) -> float:
    """Seconds to wait before a restart.

    Args:
        wait: The strategy; it sees ``attempt`` and ``error`` as tenacity would show them.
        attempt: Which restart of the actor within the window, from 1.
        error: The failure.

    Raises:
        ValueError: The strategy gives no finite number.
    """
    state = tenacity.RetryCallState(tenacity.Retrying(), fn=None, args=(), kwargs={})
    state.attempt_number = attempt
    state.set_exception((type(error), error, error.__traceback__))
    seconds = float(wait(state))
    if not math.isfinite(seconds):
        raise ValueError(f"the wait strategy {wait!r} gives {seconds} seconds: expected a finite number")
    return max(0.0, seconds)


class Budget:
    """The restarts of one actor within a sliding window."""

    __slots__ = ("_spent",)

    def __init__(self) -> None:
        self._spent: deque[float] = deque()

    def __repr__(self) -> str:
        return f"<Budget: {len(self._spent)} spent>"

    def spend(self, now: float, supervision: Supervision) -> int | None:
        """Take one restart.

        Args:
            now: Monotonic seconds, never less than before.
            supervision: Says how many there are.

        Returns:
            Which one it is within the window, from 1; None: they are used up.
        """
        while self._spent and now - self._spent[0] > supervision.within:
            self._spent.popleft()
        if len(self._spent) >= supervision.max_restarts:
            return None
        self._spent.append(now)
        return len(self._spent)
