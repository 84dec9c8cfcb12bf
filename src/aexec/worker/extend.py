"""Worker extensions: classes whose methods a worker class gets, without anybody's class being changed.

Several may be stacked, as a trainer's and a monitor's. A name that two of them have, or one
of them and the worker class, is an error: one of the two would be replaced in silence (G57).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aexec.errors import ConfigError
from aexec.worker.names import load, name_of

__all__ = ("extended",)


def extended(worker_cls: type[Any], extensions: Sequence[str | type[Any]]) -> type[Any]:
    """A subclass of a worker class and of its extensions; the class itself if there are none.

    Args:
        worker_cls: Its ``__init__`` is the one that runs.
        extensions: Classes, or ``pkg.mod:Class``.

    Raises:
        ConfigError: One is no class, has an ``__init__``, which would never run, or a name
            clashes; both owners are named.
    """
    mixins = [_loaded(extension) for extension in extensions]
    if not mixins:
        return worker_cls
    owners: dict[str, type[Any]] = dict.fromkeys(_names(worker_cls), worker_cls)
    for mixin in mixins:
        if "__init__" in _defined(mixin):
            raise ConfigError(
                f"worker_extension {name_of(mixin)} has an __init__, which would never run: the worker is made by "
                f"{name_of(worker_cls)}; set it up in a worker_init function, or in a method that is called by name"
            )
        for name in sorted(_names(mixin)):
            if (owner := owners.setdefault(name, mixin)) is not mixin:
                raise ConfigError(
                    f"worker_extension {name_of(mixin)} and {name_of(owner)} both have {name!r}: rename one of them"
                )
    try:
        made = type(worker_cls.__name__, (worker_cls, *mixins), {"__doc__": worker_cls.__doc__})
    except TypeError as error:
        raise ConfigError(
            f"{name_of(worker_cls)} cannot be extended by {', '.join(map(name_of, mixins))}: {error}"
        ) from error
    made.__module__, made.__qualname__ = worker_cls.__module__, worker_cls.__qualname__
    return made


def _loaded(extension: str | type[Any]) -> type[Any]:
    found: Any = load(extension, "worker_extension") if isinstance(extension, str) else extension
    if not isinstance(found, type):
        raise ConfigError(f"worker_extension has {extension!r}: expected a class, or 'package.module:Class'")
    return found


def _names(cls: type[Any]) -> set[str]:
    """What others could mean by name; names with two underscores at both ends are Python's."""
    return {name for name in _defined(cls) if not (name.startswith("__") and name.endswith("__"))}


def _defined(cls: type[Any]) -> set[str]:
    return {name for base in cls.__mro__ if base is not object for name in vars(base)}
