"""Which functions and classes another process can import, and which have to travel by value."""

from __future__ import annotations

import functools
import sys
from importlib.machinery import ModuleSpec
from typing import Any

__all__ = ("can_be_imported",)


def can_be_imported(module_name: str) -> bool:
    """True if a fresh interpreter with this one's ``sys.path`` finds the same module.

    It does not find ``__main__``, nor what a notebook or a plugin made up, nor a file that
    was loaded under a name of the loader's choice.
    """
    module = sys.modules.get(module_name)
    if module is None or module_name in ("__main__", "__mp_main__"):
        return False
    origin = getattr(module, "__file__", None)
    if origin is None:
        return module_name in sys.builtin_module_names or _can_be_found(module_name, None, tuple(sys.path))
    return _can_be_found(module_name, origin, tuple(sys.path))


@functools.lru_cache(maxsize=1024)
def _can_be_found(name: str, origin: str | None, _path: tuple[str, ...]) -> bool:
    parent, _, _ = name.rpartition(".")
    found = _find(name, parent)
    if found is None or (parent and not can_be_imported(parent)):
        return False
    return origin is None or found.origin in (origin, None, "built-in", "frozen")


def _find(name: str, parent: str) -> ModuleSpec | None:
    path: Any = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if parent and path is None:
        return None
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = find(name, path) if find is not None else None
        if spec is not None:
            return spec
    return None
