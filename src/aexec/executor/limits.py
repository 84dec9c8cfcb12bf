"""Relative time limits, as users give them, to what travels inside: absolute deadlines. Pure."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

from aexec.errors import CallTimeout, ConfigError
from aexec.worker.names import name_of

__all__ = ("check_arguments", "check_drain", "check_method", "check_ranks", "check_reply_rank", "check_timeout")


def check_timeout(call: str, timeout: Any) -> float | None:
    """Refuse limits that mean nothing, before anything is sent.

    Args:
        call: For the error: what is called.
        timeout: Seconds; None in words: no limit.

    Raises:
        ConfigError: It is not a number, or infinite.
        CallTimeout: It is zero or negative: past already, so nothing runs.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not math.isfinite(timeout):
        raise ConfigError(
            f"timeout of {call} is {timeout!r}: expected a finite number of seconds, or None for no limit"
        )
    if timeout <= 0:
        raise CallTimeout(call, timeout, started=False)
    return float(timeout)


def check_method(method: Any) -> str:
    """The name of what is to be called.

    Raises:
        ConfigError: It is no name, and cannot be called.
    """
    if isinstance(method, str):
        return method
    if not callable(method):
        raise ConfigError(f"method is {method!r}: expected a method's name, or a function that takes the worker")
    return name_of(method)


def check_arguments(call: str, args: Any, kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, as they are sent.

    Raises:
        ConfigError: ``args`` is no sequence of them (a text is one argument, not one for each letter), or
            ``kwargs`` no mapping.
    """
    if isinstance(args, str | bytes) or not hasattr(args, "__iter__"):
        raise ConfigError(f"args of {call} is {args!r}: expected a tuple; for one argument, args=({args!r},)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ConfigError(f"kwargs of {call} is {kwargs!r}: expected a dict")
    return tuple(args), dict(cast("Mapping[str, Any]", kwargs or {}))


def check_drain(drain: Any) -> float:
    """Refuse what is no time to drain.

    Raises:
        ConfigError: It is not a number, infinite, or negative.
    """
    if isinstance(drain, bool) or not isinstance(drain, int | float) or not 0 <= drain < math.inf:
        raise ConfigError(f"drain of close is {drain!r}: expected a finite number of seconds, 0 for none")
    return float(drain)


def check_ranks(ranks: Sequence[int] | None, world_size: int) -> tuple[int, ...]:
    """The ranks to call, in rank order; all for None.

    Raises:
        ConfigError: None at all, one twice, or one that does not exist.
    """
    if ranks is None:
        return tuple(range(world_size))
    try:
        chosen = tuple(sorted(map(operator.index, ranks)))
    except TypeError:  # a single rank, or names of ranks
        chosen = ()
    if not chosen or len(set(chosen)) < len(chosen) or not all(0 <= rank < world_size for rank in chosen):
        raise ConfigError(
            f"ranks is {ranks!r}: expected distinct ranks from 0 to {world_size - 1}, at least one as in [0], "
            "or None for all"
        )
    return chosen


def check_reply_rank(reply_rank: int | None, ranks: tuple[int, ...]) -> None:
    """Refuse a rank that is not called.

    Raises:
        ConfigError: Nobody would reply.
    """
    if reply_rank is not None and reply_rank not in ranks:
        raise ConfigError(f"reply_rank is {reply_rank!r}: expected one of the ranks that are called, {list(ranks)}")
