"""Names of a package that are imported from their rooms when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

__all__ = ("lazy_names",)


def lazy_names(
    package: dict[str, Any], rooms: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__``, by which it gives names without importing them before.

    Args:
        package: Its ``globals()``; a name stays there once it was used.
        rooms: Modules, and the names that each of them has.
    """
    room_of = {name: room for room, names in rooms.items() for name in names}

    def find(name: str) -> Any:
        if (room := room_of.get(name)) is None:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        value = package[name] = getattr(import_module(room), name)
        return value

    return find, lambda: sorted({*package, *room_of})
