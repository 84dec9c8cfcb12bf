"""Starts that fail, hang, or find a place unlike the driver's own."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from stopwatch import Stopwatch

from aexec.errors import CallTimeout, ConfigError, RemoteError, WorkerDied
from aexec.testing import faulty
from aexec.testing.processes import ProcessWatch, descendants

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_files_are_left", "no_processes_are_left")]


@pytest.fixture
def no_processes_are_left() -> Iterator[None]:
    """Fails a test after which this process has descendants that it did not have before."""
    before = set(descendants())
    yield
    with ProcessWatch(set(descendants()) - before) as watch:
        assert watch.alive(3.0) == []


async def test_a_failed_start_raises_the_root_cause(open_faulty):
    """G32: the one rank's own error, at once, while the others wait for it: type, text, rank, traceback; then force."""
    began = time.monotonic()
    with pytest.raises(ValueError, match="bad cfg") as caught:
        await open_faulty(close_grace=0.5, worker_kwargs={"fail_rank": 2, "seconds": 60.0})
    assert time.monotonic() - began < 15.0
    error = caught.value
    assert isinstance(error, RemoteError)
    assert (error.rank, error.method) == (2, "load_model")
    assert "in load_model" in error.traceback_text
    assert sum("no answer" in note for note in error.__notes__) == 2


async def test_a_start_past_its_limit_says_where_each_rank_was(open_faulty):
    """G33: in its construction or in a hook; and cleans up."""

    async def hang(phase):
        slow = {"hang_in": phase, "seconds": 60.0}
        with pytest.raises(CallTimeout, match=r"the start of the workers passed its limit of 8 s") as caught:
            await open_faulty(ranks=2, start_timeout=8.0, close_grace=0.5, worker_kwargs=slow)
        notes = "\n".join(caught.value.__notes__)
        for rank in range(2):
            assert f"rank {rank} (pid " in notes
        assert f"is at {phase}" in notes

    await asyncio.gather(
        hang("__init__"), hang("load_model")
    )  # each takes its eight seconds, in which four processes come alive on a machine that has more to do


async def test_a_start_that_loses_a_rank_says_which(open_faulty):
    """G33, G30: a rank that is killed while it starts is no time-out; the error says what it was doing."""
    with pytest.raises(WorkerDied, match="ended by SIGKILL") as caught:
        await open_faulty(ranks=2, close_grace=0.5, worker_init=[faulty.WAYS_TO_DIE["SIGKILL"]])
    assert "worker_init" in caught.value.phase


async def test_a_worker_module_that_breaks_at_import_is_named(open_faulty, tmp_path, monkeypatch):
    """G59, G32: the error has its type, and the lines that it printed before have the rank in front of them."""
    (tmp_path / "breaks_at_import.py").write_text(
        "import sys\nprint('before', file=sys.stderr)\nraise KeyError('oh')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyError, match="oh"):
        await open_faulty(ranks=2, worker_cls="breaks_at_import:Worker")


def test_lines_of_workers_have_the_rank_from_the_first_on(start, tmp_path):
    """G59: also those that are printed while the worker's module is imported; a line of JSON stays one."""
    (tmp_path / "talks.py").write_text(
        "import os, sys\n"
        "from aexec.testing.faulty import FaultyWorker as Worker\n"
        "os.write(2, b'imported here\\n')\n"
        'print(\'{"event": "as json"}\', flush=True)\n'
    )
    program = start(
        """
sys.path.insert(0, os.getcwd())

async def main():
    async with make(worker_cls="talks:Worker") as executor:
        await executor.collective_rpc("complain", ("ouch\\n",), ranks=[1])

asyncio.run(main())
""",
        cwd=tmp_path,
    )
    _, errors, code = program.finish()
    assert code == 0
    lines = errors.splitlines()
    imported = [line for line in lines if "imported here" in line]
    assert len(imported) == 2
    assert all(any(f"ank {rank}" in line or f"ank{rank}" in line for line in imported) for rank in range(2))
    assert len([line for line in lines if "ouch" in line and "1" in line.split("ouch")[0]]) == 1
    assert lines.count('{"event": "as json"}') == 2


def title_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_text() + Path(f"/proc/{pid}/comm").read_text()


async def test_processes_are_called_by_their_rank(mp):
    """G59: in ``ps`` and ``top``."""
    titles = [title_of(info.pid) for info in mp.ranks]
    assert all("aexec" in title for title in titles)
    assert len(set(titles)) == 3


async def test_workers_are_no_copies_of_the_driver(open_faulty, monkeypatch):
    """G23: what the driver's memory holds is not there: it is never forked. One that asks for that is told why not."""
    monkeypatch.setattr(faulty, "FLAGS", ["raised in the driver"])
    async with open_faulty(ranks=2) as executor:
        assert await executor.collective_rpc("flags") == [[], []]
    with pytest.raises(ConfigError, match="fork"):
        await open_faulty(ranks=2, start_method="fork")


async def test_registration_code_runs_in_each_worker(open_faulty):
    """G57: before the worker is made; by name, or a function that only the driver knows."""

    def register():
        faulty.FLAGS.append("a function of the test's")

    async with open_faulty(ranks=2, worker_init=["aexec.testing.faulty:raise_flag", register]) as executor:
        assert await executor.collective_rpc("flags") == [["raised in the worker", "a function of the test's"]] * 2
    assert faulty.FLAGS == []


async def test_the_environment_of_workers_follows_one_rule(open_faulty, monkeypatch):
    """G39: the driver's own variables by the list, the executor's on top, and never those of another launcher."""
    monkeypatch.setenv("AEXEC_FIELD_CASE", "of the driver")
    monkeypatch.setenv("RANK", "77")
    monkeypatch.setenv("SECRET_OF_SOMEBODY", "not for workers")
    async with open_faulty(ranks=2, env={"MINE": "set", "AEXEC_FIELD_CASE": "of the executor"}) as executor:

        async def variable(name):
            return await executor.collective_rpc("variable", (name,))

        assert await variable("MINE") == ["set"] * 2
        assert await variable("AEXEC_FIELD_CASE") == ["of the executor"] * 2
        assert await variable("RANK") == ["0", "1"]
    assert os.environ["RANK"] == "77"


async def test_a_list_of_devices_is_the_users(open_faulty):
    """G40: workers see it as it was given, in its order, and no layer cuts it down."""
    async with open_faulty(ranks=2, env={"CUDA_VISIBLE_DEVICES": "3,2"}) as executor:
        assert await executor.collective_rpc("variable", ("CUDA_VISIBLE_DEVICES",)) == ["3,2"] * 2


async def test_a_backend_that_is_asked_for_is_taken(open_faulty):
    """G42: one rank or many, ``mp`` means a process of its own."""
    async with open_faulty("mp", ranks=1) as executor:
        assert executor.world_size == 1
        (pid,) = await executor.collective_rpc("pid")
        assert pid == executor.ranks[0].pid != os.getpid()


async def test_a_setting_that_is_shown_is_the_one_that_is_used(open_faulty):
    """G46: in the driver, in the workers, and by the clock."""
    async with open_faulty(ranks=2, rpc_timeout=0.25) as executor:
        assert executor.config.rpc_timeout == 0.25
        of_workers = await executor.collective_rpc(lambda worker: worker.context.config.rpc_timeout, timeout=10.0)
        assert of_workers == [0.25] * 2
        with Stopwatch() as watch, pytest.raises(CallTimeout, match=r"limit of 0\.25 s"):
            await executor.collective_rpc("async_block", (30.0,))
        assert watch.wall > 0.24
        assert watch.seconds < 1.0


async def test_a_start_that_is_cancelled_leaves_nothing(open_faulty):
    """Wherever it was: before a process is there, among them, in a hook."""
    for pause in (0.01, 0.2, 0.6, 1.5):
        starting = asyncio.ensure_future(
            asyncio.wait_for(
                open_faulty(ranks=2, close_grace=0.3, worker_kwargs={"hang_in": "load_model", "seconds": 60.0}), pause
            )
        )
        with pytest.raises(TimeoutError):
            await starting


def sockets_of(pid):
    """Inodes of the sockets that a process has."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]  # noqa: PTH115
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def rows(table):
    return [line.split() for line in Path("/proc/net", table).read_text().splitlines()]


def test_nothing_listens(start):
    """G50: no port, no named socket, in no process: only inherited ends, so there is nowhere to send a pickle to."""
    program = start("""
async def main():
    async with make() as executor:
        say("open")
        await asyncio.sleep(60)

asyncio.run(main())
""")
    assert program.line() == "open"
    inodes = set().union(*(sockets_of(pid) for pid in [program.pid, *descendants(program.pid)]))
    assert len(inodes) > 4
    assert [row for table in ("tcp", "tcp6", "udp", "udp6") for row in rows(table) if row[9] in inodes] == []
    assert [row for row in rows("unix") if row[6] in inodes and len(row) > 7] == []


@pytest.mark.timeout(120)
def test_eight_programs_start_at_the_same_time(start):
    """G49: no two of them meet at one port, one name, one file; not their torch groups either."""
    programs = [
        start("""
async def main():
    say("here")
    sys.stdin.readline()
    async with make() as executor:
        methods = await executor.collective_rpc(lambda worker: worker.context.distributed_init_method)
        assert methods[0] == methods[1] != ""
        say(*await executor.collective_rpc("pid"), methods[0])

asyncio.run(main())
""")
        for _ in range(8)
    ]
    assert [program.line() for program in programs] == ["here"] * 8  # stdin is at its end: they go as they come
    said = [program.finish(90.0) for program in programs]
    assert [(errors, code) for _, errors, code in said] == [("", 0)] * 8
    words = [output.split() for output, _, _ in said]
    assert len({pid for pids in words for pid in pids[:2]}) == 16
    assert len({method for *_, method in words}) == 8


async def test_an_interpreter_that_cannot_start_is_an_error(open_faulty, monkeypatch):
    """As in an embedded Python: an error that says so, and nothing is left."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ConfigError, match="/nowhere/python"):
        await open_faulty(ranks=2)
