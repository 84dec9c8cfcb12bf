"""``pkg.mod:attribute`` to the object that it names, with errors a user can act on."""

from __future__ import annotations

import difflib
import functools
import importlib
from typing import Any

from aexec.errors import ConfigError

__all__ = ("load", "name_of")


def load(name: str, setting: str) -> Any:
    """Import what ``name`` names.

    Args:
        name: As in ``my_package.workers:MyWorker``.
        setting: Where it was given, for the error.

    Raises:
        ConfigError: It has another form, or leads nowhere.
    """
    module_name, colon, path = name.partition(":")
    if not (colon and module_name and path):
        raise ConfigError(f"{setting} is {name!r}: expected the form 'package.module:name'")
    if module_name == "__main__":
        raise ConfigError(
            f"{setting} is {name!r}: no worker process runs your program; give {path} itself, not its name"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"{setting} is {name!r}: there is no module {error.name!r} on sys.path") from error
    try:
        return functools.reduce(getattr, path.split("."), module)
    except AttributeError as error:
        close = difflib.get_close_matches(path, dir(module), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"{setting} is {name!r}: {module_name} has no {path!r}{hint}") from error


def name_of(value: object) -> str:
    """How to call a class, a function or any other callable in a message."""
    return str(getattr(value, "__qualname__", None) or type(value).__qualname__)
