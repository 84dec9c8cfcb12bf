"""The front door: what it offers, and that each tool sees the same."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import aexec
import aexec.executor

SOURCE = ast.parse(Path(aexec.__file__).read_text(encoding="utf-8"))
PACKAGES = sorted(
    f"aexec.{module.name}" for module in pkgutil.iter_modules(aexec.__path__) if module.name not in {"__main__", "cli"}
)


def typed_names() -> dict[str, str]:
    """Return name to module of the imports that type checkers read in the front door."""
    block = next(node for node in SOURCE.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or "": node.module or "" for node in imports for alias in node.names}


def test_the_front_door_is_small() -> None:
    """At most thirty names, so that a newcomer reads them all."""
    assert 20 < len(aexec.__all__) <= 30
    assert len(aexec.__all__) == len(set(aexec.__all__))


@pytest.mark.parametrize("name", aexec.__all__)
def test_every_name_leads_somewhere(name: str) -> None:
    """Each name can be had, and is listed by dir()."""
    assert getattr(aexec, name) is not None
    assert name in dir(aexec)


def test_type_checkers_see_the_names_that_python_sees() -> None:
    """The imports under TYPE_CHECKING name the same things in the same rooms as the lazy table."""
    room_of = {name: room for room, names in aexec._ROOMS.items() for name in names}
    assert typed_names() == room_of
    assert sorted(room_of) == sorted(aexec.__all__)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    """The lazy door says no as any module does."""
    with pytest.raises(AttributeError, match="module 'aexec' has no attribute 'AsyncLLMM'"):
        _ = aexec.AsyncLLMM
    with pytest.raises(AttributeError, match=r"module 'aexec\.executor' has no attribute 'WorkerGroups'"):
        _ = aexec.executor.WorkerGroups


@pytest.mark.parametrize("package", ["aexec", "aexec.executor", "aexec.testing"])
def test_a_name_is_imported_once(package: str) -> None:
    """What was used is the package's own from then on, and ``dir()`` lists what was not used yet."""
    room = importlib.import_module(package)
    assert set(room.__all__) <= set(dir(room))
    for name in room.__all__:
        assert getattr(room, name) is vars(room)[name]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_says_what_it_is_for_and_offers(package: str) -> None:
    """Each room has a docstring, and every name in its ``__all__`` can be had."""
    room = importlib.import_module(package)
    assert room.__doc__
    assert [name for name in getattr(room, "__all__", ()) if not hasattr(room, name)] == []
