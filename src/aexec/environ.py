"""Every environment variable that aexec reads, and the only place that reads them.

Each has a parser, a default and one line of prose; ``docs/reference/environment.md`` is
checked against this table. Libraries that aexec uses have variables of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from aexec.errors import ConfigError

__all__ = ("CACHE_DIR", "LOG_FORMAT", "LOG_LEVEL", "VARIABLES", "Variable", "change", "inherited")

T = TypeVar("T")
LEVELS = ("debug", "info", "warning", "error", "critical")
FORMATS = ("auto", "console", "json")


@dataclass(frozen=True, slots=True)
class Variable(Generic[T]):
    """One environment variable.

    Attributes:
        name: As in ``AEXEC_CACHE_DIR``.
        parse: Makes the value of the text; raises ``ValueError`` with what it expects.
        default: The text that stands for a variable that is unset or empty.
        prose: What it is for, in one line.
    """

    name: str
    parse: Callable[[str], T]
    default: str
    prose: str

    def is_set(self, environment: Mapping[str, str] | None = None) -> bool:
        """True if the environment says something; False: the default holds."""
        return bool((os.environ if environment is None else environment).get(self.name))

    def read(self, environment: Mapping[str, str] | None = None) -> T:
        """Return the value now.

        Raises:
            ConfigError: The text cannot be parsed; names variable, text and expectation.
        """
        text = (os.environ if environment is None else environment).get(self.name) or self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ConfigError(f"{self.name} is {text!r}: expected {error}") from error


def _path(text: str) -> Path:
    return Path(os.path.expandvars(text)).expanduser()


def _cache_dir(text: str) -> Path:
    return _path(text) if text != _USER_CACHE else _path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "aexec"


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return text.lower()

    return parse


def inherited() -> dict[str, str]:
    """The environment as it is now, for processes that are to have it too."""
    return dict(os.environ)


def change(changes: Mapping[str, str | None]) -> None:
    """Give a process of ours the environment it is to have; None removes a variable."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


_USER_CACHE = "$XDG_CACHE_HOME/aexec"

CACHE_DIR = Variable("AEXEC_CACHE_DIR", _cache_dir, _USER_CACHE, "Where converted models are kept.")
LOG_LEVEL = Variable("AEXEC_LOG_LEVEL", _one_of(*LEVELS), "warning", "Least severe log record that is shown.")
LOG_FORMAT = Variable(
    "AEXEC_LOG_FORMAT",
    _one_of(*FORMATS),
    "auto",
    "How log records look: console lines, json objects, or auto: console on a terminal, json elsewhere.",
)

VARIABLES: tuple[Variable[Any], ...] = (CACHE_DIR, LOG_FORMAT, LOG_LEVEL)
