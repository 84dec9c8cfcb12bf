"""Which parts of a rank's model are in memory, and what that allows. A table; pure.

A rank has weights and a KV cache. Sleep takes them away, ``wake_up`` brings back what it
can, and new weights come by a reload or by an update in chunks. Whatever is not whole
refuses to run: the alternative is text that looks almost right (G55).
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Generator, Iterable

from aexec.errors import ConfigError, ModelNotReady

__all__ = ("TRANSITIONS", "WAKE_TAGS", "Residency", "WeightsEvent", "WeightsState", "sleep_event", "wake_tags")

WAKE_TAGS = ("weights", "kv_cache")


class WeightsState(enum.Enum):
    """Where the weights are; the text goes into errors."""

    UNLOADED = "the weights are not loaded"
    READY = "the weights are there"
    ASLEEP = "the weights are asleep (sleep level 1)"
    DISCARDED = "the weights are discarded (sleep level 2)"
    MISSING = "the weights are missing since sleep level 2"
    UPDATING = "the weights are half updated"


class WeightsEvent(enum.Enum):
    """What happens to them; the text goes into errors."""

    LOADED = "loading weights"
    LOST = "giving up the weights"
    SLEEP_1 = "sleep level 1"
    SLEEP_2 = "sleep level 2"
    WAKE = "wake_up"
    START = "an update of the weights"
    FINISH = "finishing an update of the weights"


_S, _E = WeightsState, WeightsEvent

TRANSITIONS: dict[WeightsState, dict[WeightsEvent, WeightsState]] = {
    _S.UNLOADED: {_E.LOADED: _S.READY},
    _S.READY: {
        _E.LOADED: _S.READY,
        _E.LOST: _S.UNLOADED,
        _E.SLEEP_1: _S.ASLEEP,
        _E.SLEEP_2: _S.DISCARDED,
        _E.WAKE: _S.READY,
        _E.START: _S.UPDATING,
    },
    _S.ASLEEP: {_E.SLEEP_1: _S.ASLEEP, _E.SLEEP_2: _S.DISCARDED, _E.WAKE: _S.READY},
    _S.DISCARDED: {_E.SLEEP_1: _S.DISCARDED, _E.SLEEP_2: _S.DISCARDED, _E.WAKE: _S.MISSING},
    _S.MISSING: {
        _E.LOADED: _S.READY,
        _E.LOST: _S.UNLOADED,
        _E.SLEEP_1: _S.DISCARDED,
        _E.SLEEP_2: _S.DISCARDED,
        _E.WAKE: _S.MISSING,
        _E.START: _S.UPDATING,
    },
    _S.UPDATING: {
        _E.LOADED: _S.READY,
        _E.LOST: _S.UNLOADED,
        _E.SLEEP_2: _S.DISCARDED,
        _E.WAKE: _S.UPDATING,
        _E.FINISH: _S.READY,
    },
}

_REMEDIES = {
    _S.UNLOADED: "call load_weights()",
    _S.READY: "call start_weight_update() first",
    _S.ASLEEP: "call wake_up(['weights'])",
    _S.DISCARDED: "call wake_up(['weights']), then load_weights() or update_weights()",
    _S.MISSING: "call load_weights() or update_weights()",
    _S.UPDATING: "send what is missing and call finish_weight_update(), or call load_weights()",
}


class Residency:
    """The state of one rank's model.

    Attributes:
        weights: Where the weights are.
        has_cache: True while the KV cache is there.
        version: Counts complete sets of weights, from 1.
        num_changes: Counts all that may move or change them, before it does.
    """

    def __init__(self) -> None:
        self.weights = WeightsState.UNLOADED
        self.has_cache = False
        self.version = self.num_changes = 0
        self._still = threading.Lock()
        self._cache_slept = False

    def __repr__(self) -> str:
        cache = "there" if self.has_cache else "asleep" if self._cache_slept else "not there yet"
        return f"<Residency: {self.weights.value}, version {self.version}, the KV cache is {cache}>"

    def move(self, event: WeightsEvent) -> WeightsState:
        """Take ``event``; returns the state before it.

        Raises:
            ModelNotReady: It cannot happen now.
        """
        self.check(event)
        self.disturb()
        before, self.weights = self.weights, TRANSITIONS[self.weights][event]
        if event in (WeightsEvent.LOADED, WeightsEvent.FINISH):
            self.version += 1
        return before

    def check(self, event: WeightsEvent) -> None:
        """Raise what :meth:`move` would raise, and change nothing."""
        if event not in TRANSITIONS[self.weights]:
            raise ModelNotReady(event.value, self.weights.value, _REMEDIES[self.weights])

    def disturb(self) -> None:
        """The weights are about to move or to change: whoever reads them beside the steps has to give up."""
        with self._still:
            self.num_changes += 1

    @contextlib.contextmanager
    def still(self, num_changes: int) -> Generator[None]:
        """Keep the weights as they are meanwhile, for a thread that reads them beside the steps.

        Args:
            num_changes: What the count was when it began.

        Raises:
            ModelNotReady: There was a change since.
        """
        with self._still:
            if num_changes != self.num_changes:
                raise ModelNotReady("reading the weights", "they have changed meanwhile", "read them again")
            yield

    def put_back(self, before: WeightsState) -> None:
        """An update that has changed nothing is over: the weights are what they were."""
        self.weights = before

    def cache_made(self) -> None:
        """There is a KV cache."""
        self.has_cache, self._cache_slept = True, False

    def cache_dropped(self) -> None:
        """It is gone, if there was one."""
        self._cache_slept = self._cache_slept or self.has_cache
        self.has_cache = False

    @property
    def cache_sleeps(self) -> bool:
        """True when there was a KV cache, and ``wake_up`` has to make it again."""
        return self._cache_slept

    def require_weights(self, wanted: str) -> None:
        """Refuse what needs whole weights.

        Raises:
            ModelNotReady: They are asleep, missing or half updated.
        """
        if self.weights is not WeightsState.READY:
            raise ModelNotReady(wanted, self.weights.value, _REMEDIES[self.weights])

    def require_ready(self, wanted: str) -> None:
        """Refuse to run on anything but whole weights and a KV cache.

        Raises:
            ModelNotReady: Something is not there.
        """
        self.require_weights(wanted)
        if self._cache_slept:
            raise ModelNotReady(wanted, "the KV cache is asleep", "call wake_up(['kv_cache'])")


def wake_tags(tags: Iterable[str] | None) -> frozenset[str]:
    """What to wake; None: all of it.

    Raises:
        ConfigError: A tag is unknown.
    """
    if isinstance(tags, str):
        tags = (tags,)
    if tags is not None and not hasattr(tags, "__iter__"):
        raise ConfigError(f"tags of wake_up are {tags!r}: expected any of {', '.join(WAKE_TAGS)}, or None")
    wanted = frozenset(WAKE_TAGS if tags is None else tags)
    unknown = sorted(map(str, wanted.difference(WAKE_TAGS)))
    if unknown or not wanted:
        raise ConfigError(f"tags of wake_up are {unknown or 'empty'}: expected any of {', '.join(WAKE_TAGS)}, or None")
    return wanted


def sleep_event(level: int) -> WeightsEvent:
    """The event of a sleep level.

    Raises:
        ConfigError: There is no such level.
    """
    if level not in (1, 2):
        raise ConfigError(
            f"level of sleep is {level!r}: expected 1 (weights are kept in host memory) or 2 (they are discarded)"
        )
    return WeightsEvent.SLEEP_1 if level == 1 else WeightsEvent.SLEEP_2
