"""Every environment variable that aexec reads, and the only place that reads them.

Each has a parser, a default and one line of prose; ``docs/reference/environment.md`` is
checked against this table. Libraries that aexec uses have variables of their own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from aexec.errors import ConfigError

__all__ = (
    "CACHE_DIR",
    "ENV_EXCLUDE_FILE",
    "HOST_IP",
    "LOG_FORMAT",
    "LOG_LEVEL",
    "NODE_KEY",
    "NODE_KEY_FILE",
    "VARIABLES",
    "Variable",
    "change",
    "excluded",
    "inherited",
    "set_default",
)

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


def set_default(name: str, value: str) -> None:
    """Give this process a variable that a library reads from it, unless it has one."""
    os.environ.setdefault(name, value)


def excluded() -> tuple[str, ...]:
    """The patterns of variables that workers never inherit: the nodes' key, and what ``AEXEC_ENV_EXCLUDE_FILE`` says.

    Raises:
        ConfigError: A file cannot be read, or is no JSON list of texts.
    """
    return (NODE_KEY.name, *(pattern for path in ENV_EXCLUDE_FILE.read() for pattern in _patterns_of(path)))


def _patterns_of(path: Path) -> list[str]:
    try:
        patterns: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{ENV_EXCLUDE_FILE.name}: {str(path)!r} cannot be read: {error}") from error
    if not isinstance(patterns, list) or not all(isinstance(each, str) for each in cast("list[object]", patterns)):
        raise ConfigError(
            f"{ENV_EXCLUDE_FILE.name}: {str(path)!r} holds {patterns!r}: expected a JSON list of names or patterns, "
            'such as ["HF_TOKEN", "MY_*"]'
        )
    return cast("list[str]", patterns)


_USER_CACHE = "$XDG_CACHE_HOME/aexec"

CACHE_DIR = Variable("AEXEC_CACHE_DIR", _cache_dir, _USER_CACHE, "Where converted models are kept.")
ENV_EXCLUDE_FILE = Variable(
    "AEXEC_ENV_EXCLUDE_FILE",
    lambda text: tuple(_path(each) for each in text.split(os.pathsep) if each),
    "",
    "Files (with : between them), each a JSON list of names or patterns of variables that workers never inherit.",
)
HOST_IP = Variable(
    "AEXEC_HOST_IP", str.strip, "", "This node's address for the processes of other nodes; empty: found out."
)
LOG_LEVEL = Variable("AEXEC_LOG_LEVEL", _one_of(*LEVELS), "warning", "Least severe log record that is shown.")
LOG_FORMAT = Variable(
    "AEXEC_LOG_FORMAT",
    _one_of(*FORMATS),
    "auto",
    "How log records look: console lines, json objects, or auto: console on a terminal, json elsewhere.",
)
NODE_KEY = Variable(
    "AEXEC_NODE_KEY",
    str,
    "",
    "The key that all nodes of an executor share, 64 hexadecimal digits; workers do not inherit it.",
)
NODE_KEY_FILE = Variable(
    "AEXEC_NODE_KEY_FILE",
    lambda text: str(_path(text)) if text else text,
    "",
    "A file that holds that key and that only its owner can read; `aexec worker --make-key FILE` makes one.",
)

VARIABLES: tuple[Variable[Any], ...] = (
    CACHE_DIR,
    ENV_EXCLUDE_FILE,
    HOST_IP,
    LOG_FORMAT,
    LOG_LEVEL,
    NODE_KEY,
    NODE_KEY_FILE,
)
