"""What operations on a loaded model report: sleep, wake-up and new weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec

from aexec.errors import ConfigError
from aexec.messages.structured import short

__all__ = (
    "WEIGHT_METHODS",
    "NamedTensors",
    "PauseMode",
    "SleepReport",
    "WakeReport",
    "WeightsReport",
    "pair_of",
    "pairs_of",
)

#: Methods of workers that give them new weights, whatever the worker class.
WEIGHT_METHODS = ("load_model", "load_weights", "reload_weights", "update_weights")

NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""What an update of weights is given: tensors of the whole model by their names."""

_WANTED = "expected full tensors by their names: a dict, or a list or an iterator of (name, tensor)"

PauseMode = Literal["abort", "finish", "keep"]
"""What a pause means for steps: see ``Executor.pause``."""


class SleepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank let go of.

    Attributes:
        level: 1 or 2.
        weights: Where the weights are now. ``kept``: where they were, for on a CPU the host
            copy is the weights themselves; ``offloaded``: in host memory; ``discarded``: nowhere.
        freed_weights_bytes: Weights that were let go of on the device.
        freed_cache_bytes: KV cache that was let go of; on a CPU only what was written to was memory.
        held_bytes: Weights that are still held, in host memory.
        memory_before: Resident bytes of the process (CPU), or allocated ones of the device, before.
        memory_after: The same, after.
    """

    level: Literal[1, 2]
    weights: Literal["kept", "offloaded", "discarded"]
    freed_weights_bytes: int
    freed_cache_bytes: int
    held_bytes: int
    memory_before: int
    memory_after: int


class WakeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has again.

    Attributes:
        weights: ``ready``; ``asleep``: they were not among the tags; ``missing``: they were
            discarded, and nothing runs until ``load_weights`` or ``update_weights``.
        kv_cache: ``ready`` and empty, or ``asleep``.
    """

    weights: Literal["ready", "asleep", "missing"]
    kv_cache: Literal["ready", "asleep"]

    @property
    def is_ready(self) -> bool:
        """True when forward passes may come again."""
        return self.weights == self.kv_cache == "ready"


class WeightsReport(msgspec.Struct, frozen=True, kw_only=True):
    """New weights on one rank.

    Attributes:
        version: Counts the complete sets of weights that the rank has had, from 1.
        applied: Names that went into this rank's weights, in the order in which they came.
        elsewhere: How many names belong to other pipeline stages.
        is_complete: False: more has to come before anything runs.
    """

    version: int
    applied: tuple[str, ...] = ()
    elsewhere: int = 0
    is_complete: bool = True


def pairs_of(given: Any) -> Iterable[tuple[str, Any]]:
    """Names and tensors of a mapping, or what came.

    Raises:
        ConfigError: It is neither a mapping nor a list or an iterator of pairs.
    """
    if hasattr(given, "items"):
        return list(given.items())
    if isinstance(given, str | bytes) or not hasattr(given, "__iter__"):
        raise ConfigError(f"weights are {short(given)}: {_WANTED}")
    pairs: Iterable[tuple[str, Any]] = given
    return pairs


def pair_of(given: Any) -> tuple[str, Any]:
    """The name and the tensor of one weight.

    Raises:
        ConfigError: It is something else.
    """
    pair = cast("Sequence[Any]", given) if isinstance(given, tuple | list) else ()
    if len(pair) != 2 or not isinstance(pair[0], str):
        raise ConfigError(f"one of the weights is {short(cast('object', given))}: {_WANTED}")
    return pair[0], pair[1]
