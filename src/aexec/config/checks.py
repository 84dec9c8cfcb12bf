"""What settings are checked for, and how they are refused: the setting, its value, the expectation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real

from aexec.errors import ConfigError

__all__ = ("at_least", "mapping", "one_of", "seconds", "sequence_of_text", "whole")


def at_least(owner: object, low: float, *names: str) -> None:
    """Refuse numbers below ``low``; None passes."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not (_is(Real, value) and value >= low and math.isfinite(value)):
            raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}: expected at least {low:g}")


def whole(owner: object, low: int, *names: str) -> None:
    """Refuse what is no integer, or below ``low``; None passes."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not _is(Integral, value):
            raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}: expected an integer of at least {low}")
    at_least(owner, low, *names)


def seconds(owner: object, *names: str) -> None:
    """Refuse limits of time that are not positive; None passes."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not (_is(Real, value) and value > 0 and math.isfinite(value)):
            raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}: expected a positive number of seconds")


def one_of(owner: object, name: str, *choices: str) -> None:
    """Refuse what is none of ``choices``."""
    value = getattr(owner, name)
    if value not in choices:
        raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}: expected one of {', '.join(choices)}")


def mapping(owner: object, *names: str) -> None:
    """Refuse what is no dict."""
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}: expected a dict")


def sequence_of_text(owner: object, *names: str) -> None:
    """Refuse what is no list of texts, a single text above all; None passes."""
    for name in names:
        value = getattr(owner, name)
        if value is None:
            continue
        if isinstance(value, str | bytes) or not all(isinstance(each, str) for each in value):
            raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}: expected a list of texts")


def _is(kind: type, value: object) -> bool:
    """A number of this kind, numpy's included; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)
