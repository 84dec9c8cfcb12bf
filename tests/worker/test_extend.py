from __future__ import annotations

import pytest

from aexec import ExecutorConfig, open_executor
from aexec.errors import ConfigError
from aexec.worker.extend import extended


class Base:
    def __init__(self, context, start=0):
        self.context, self.count = context, start

    def add(self, value):
        self.count += value
        return self.count


class Trainer:
    def set_count(self, value):
        self.count = value


class Monitor:
    def report(self):
        return f"rank {self.context.rank} has {self.count}"


class OtherMonitor:
    def report(self):
        return "another one"


class Late:
    def __init__(self):
        self.made = True


class Locked:
    __slots__ = ("x",)


@pytest.mark.anyio
async def test_extensions_stack():
    """Methods of all of them can be called by name on every rank, beside the worker's own (G57)."""
    config = ExecutorConfig(worker_cls=Base, worker_kwargs={"start": 3}, worker_extension=[Trainer, Monitor])
    async with open_executor(config) as executor:
        assert await executor.collective_rpc("add", (2,)) == [5]
        await executor.collective_rpc("set_count", (9,))
        assert await executor.collective_rpc("report") == ["rank 0 has 9"]


def test_no_class_is_changed():
    """The worker class and the extensions are what they were; the subclass goes by the worker's name."""
    made = extended(Base, [Trainer, Monitor])
    assert made.__qualname__ == "Base"
    assert not hasattr(Base, "report")
    assert extended(Base, []) is Base


def test_a_name_that_two_extensions_have_is_refused():
    """The error names both: else one would silently replace the other (G57)."""
    with pytest.raises(ConfigError, match=r"OtherMonitor and Monitor both have 'report': rename one of them"):
        extended(Base, [Monitor, OtherMonitor])


def test_an_extension_does_not_replace_a_method_of_the_worker():
    """Nor one of its bases."""

    class Clashing:
        def add(self):
            return None

    with pytest.raises(ConfigError, match=r"Clashing and .*Derived both have 'add'|Clashing and Base both have 'add'"):
        extended(type("Derived", (Base,), {}), [Clashing])


@pytest.mark.parametrize(
    ("extension", "says"),
    [
        (Late, "has an __init__, which would never run"),
        (len, "expected a class, or 'package.module:Class'"),
        ("aexec.nowhere:Class", "there is no module 'aexec.nowhere'"),
        ("aexec.worker.extend:extended", "expected a class"),
        (int, "cannot be extended by int|both have|has an __init__"),
    ],
)
def test_what_cannot_extend_is_refused(extension, says):
    """With the reason."""
    with pytest.raises(ConfigError, match=says):
        extended(Locked, [extension])


def test_one_extension_is_a_list_as_well():
    """A lone string would be taken for its letters."""
    with pytest.raises(ConfigError, match=r"worker_extension is 'my\.module:Class': expected a list"):
        ExecutorConfig(worker_extension="my.module:Class")
