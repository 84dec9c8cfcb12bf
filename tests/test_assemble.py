from __future__ import annotations

import os

import pytest

from aexec import ExecutorConfig, ParallelConfig, open_executor
from aexec.errors import ConfigError
from aexec.executor.uniproc import UniprocGroup
from aexec.testing.workers import ProbeWorker

pytestmark = pytest.mark.anyio


class Ready:
    """A whole executor of somebody else, who wants nothing of ours."""

    def __init__(self, config, progress):
        self.config, self.progress, self.closed = config, progress, False

    @classmethod
    async def open(cls, config, *, progress=None):
        return cls(config, progress)

    async def close(self):
        self.closed = True


@pytest.mark.parametrize("backend", [None, "uni", "aexec.executor.uniproc:UniprocGroup", UniprocGroup])
async def test_a_backend_is_named_in_four_ways(backend):
    """By layout, name, path or class."""
    async with open_executor(ExecutorConfig(backend=backend, worker_cls=ProbeWorker)) as executor:
        assert await executor.collective_rpc("echo", (1,)) == [1]


async def test_a_class_that_opens_itself_is_an_executor():
    """And is closed at the end of the block like any other."""
    config = ExecutorConfig(backend=Ready)
    async with open_executor(config, progress=print) as executor:
        assert (executor.config, executor.progress) == (config, print)
    assert executor.closed


@pytest.mark.parametrize("backend", [ProbeWorker, "json:JSONDecoder", "json:loads"])
async def test_what_is_no_backend_is_refused(backend):
    """With what one has to be."""
    with pytest.raises(ConfigError, match=r"is not one: expected a subclass of aexec\.executor\.WorkerGroup"):
        await open_executor(ExecutorConfig(backend=backend))


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("external_launcher", "RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set here"),
        ("no.such:Thing", "ExecutorConfig.backend is 'no.such:Thing': there is no module 'no'"),
        ("unii", "did you mean 'uni'"),
    ],
)
async def test_a_wrong_name_says_what_is_there(backend, said):
    """Nothing is started."""
    with pytest.raises(ConfigError, match=said):
        await open_executor(ExecutorConfig(backend=backend))


async def test_an_executor_that_was_not_opened_says_how_to():
    """The usual slip is a forgotten await."""
    opening = open_executor(ExecutorConfig(worker_cls=ProbeWorker))
    with pytest.raises(AttributeError, match=r"'collective_rpc' is asked of .* not open yet: .*await open_executor"):
        opening.collective_rpc("echo", (1,))
    assert "not open yet: `executor = await open_executor(config)`" in repr(opening)


async def test_several_ranks_have_a_process_each():
    """SEL-03: the layout alone leads there, and so does the name for a single rank (G42)."""
    own = os.getpid()
    async with open_executor(ExecutorConfig(worker_cls=ProbeWorker, parallel=ParallelConfig(2))) as executor:
        assert len({own, *(info.pid for info in executor.ranks)}) == 3
    async with open_executor(ExecutorConfig(backend="mp", worker_cls=ProbeWorker)) as executor:
        assert executor.ranks[0].pid != own
