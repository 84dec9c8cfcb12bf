from __future__ import annotations

import asyncio
import gc
import io
import os
import signal
import sys
import threading
import time
from pathlib import Path

import anyio
import numpy as np
import pytest
from stopwatch import Stopwatch

from aexec import CallTimeout, ConfigError, RemoteError, WorkerDied
from aexec.errors import ArenaFull, ChannelFull, ExecutorClosed, MessageNotPortable
from aexec.executor.multiproc.output import WorkerOutput, forwarder
from aexec.executor.multiproc.process import WorkerProcess
from aexec.executor.multiproc.spawn import Started
from aexec.messages.step import ExecuteModel, StepId
from aexec.testing.workers import ProbeError, ProbeWorker
from aexec.transport import Writer

pytestmark = pytest.mark.anyio


def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


async def is_halted(pid):
    with anyio.fail_after(5):
        while state(pid) != "T":  # noqa: ASYNC110 - processes send no events
            await anyio.sleep(0.002)


def what_closing_said(caplog):
    return [record.aexec["what"] for record in caplog.records if record.aexec.get("what")]


def _limits_of_writers(_worker):
    return [thing.statistics().limit for thing in gc.get_objects() if isinstance(thing, Writer)]


# -- the end ---------------------------------------------------------------------------------


async def test_idle_workers_end_by_being_asked(opening, caplog):
    """Nothing is said about it, and it takes no time."""
    async with opening() as executor:
        with Stopwatch() as watch:
            await executor.close()
        assert watch.seconds < 0.5
    assert what_closing_said(caplog) == []


async def test_dead_halted_and_live_workers_are_brought_down_together(opening, caplog):
    """G64: within the budget, twice, at once; the lines say what each of them needed."""
    async with opening(ranks=3) as executor:
        pids = [info.pid for info in executor.ranks]
        os.kill(pids[1], signal.SIGSTOP)
        await is_halted(pids[1])
        os.kill(pids[0], signal.SIGKILL)
        with Stopwatch() as watch:
            await asyncio.gather(executor.close(), executor.close())
            await executor.close()
        assert watch.seconds < 1.0
        assert not [pid for pid in pids if state(pid)]
    (line,) = what_closing_said(caplog)
    assert line.startswith(f"rank 1 (pid {pids[1]}), idle, was stopped by a signal")


async def test_a_worker_that_will_not_end_is_made_to(opening, caplog):
    """Promise 8, G35: asked, given time, SIGTERM, SIGKILL, each with its seconds, and each is named."""
    async with opening(close_grace=0.2, term_grace=0.3) as executor:
        await executor.collective_rpc("ignore_term", ranks=[0])
        blocked = asyncio.ensure_future(executor.collective_rpc("block", (60.0,)))
        with anyio.fail_after(5):
            while {rank.phase for rank in (await executor.check_health()).ranks} != {"block"}:
                pass
        with Stopwatch() as watch:
            await executor.close()
        assert watch.wall > 0.5
        assert watch.seconds < 1.5
        with pytest.raises(ExecutorClosed):
            await blocked
    (line,) = what_closing_said(caplog)
    first, second = line.split("; ")
    assert first.endswith("block, did not end within 0.2 s of being asked, nor within 0.3 s of SIGTERM: it was killed")
    assert second.endswith("block, did not end within 0.2 s of being asked")


async def test_the_shutdown_hook_is_run(opening, tmp_path):
    """G35: in each worker, within the grace."""

    class Tidy(ProbeWorker):
        def shutdown(self):
            (tmp_path / f"rank {self.context.rank}").touch()

    async with opening(Tidy):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank 0", "rank 1"]


async def test_a_halted_worker_is_stuck(opening):
    """Health says so within its limit, and does not wait for longer."""
    async with opening() as executor:
        os.kill(executor.ranks[1].pid, signal.SIGSTOP)
        await is_halted(executor.ranks[1].pid)
        with Stopwatch() as watch:
            report = await executor.check_health(timeout=1.0)  # in which the other rank has to be heard
        assert watch.seconds < 1.3
        assert [rank.state for rank in report.ranks] == ["alive", "stuck"]
        os.kill(executor.ranks[1].pid, signal.SIGCONT)
        assert await executor.check_health()


# -- the start -------------------------------------------------------------------------------


async def test_the_first_to_fail_is_the_cause(opening, tmp_path):
    """G32: with rank, type and traceback, while the others wait; what became of them is in the notes."""
    hold = tmp_path / "not all are there yet"

    class Waits(ProbeWorker):
        def __init__(self, context):
            while context.rank == 1 and hold.exists():
                time.sleep(0.01)
            if context.rank == 1:
                raise ProbeError("bad value in the settings", code=7)
            time.sleep(30)

    def progress(phase, done, total):
        if (phase, done) == ("__init__", total):
            hold.unlink()

    hold.touch()
    began = time.monotonic()
    with pytest.raises(ProbeError) as caught:
        async with opening(Waits, ranks=3, progress=progress, close_grace=0.2):
            pass
    assert time.monotonic() - began < 15  # three processes come alive in it; the others would hang for 30 s
    error = caught.value
    assert isinstance(error, RemoteError)
    assert (error.rank, error.code) == (1, 7)
    assert "in __init__" in error.traceback_text
    notes = "\n".join(error.__notes__)
    assert "rank 0: no failure of its own, at __init__" in notes
    assert "rank 2: no failure of its own, at __init__" in notes


async def test_a_death_in_the_start_names_the_phase(opening):
    """And carries what the worker said last."""

    class Dies(ProbeWorker):
        def __init__(self, context):
            if context.rank == 1:
                os.write(2, b"no device here\n")
                os._exit(3)

    with pytest.raises(WorkerDied) as caught:
        async with opening(Dies):
            pass
    error = caught.value
    assert (error.rank, error.exit_code, error.phase, error.stderr_tail) == (1, 3, "__init__", "no device here")


async def test_a_worker_class_that_is_not_there_is_a_wrong_setting(opening):
    """Found in the worker, told here."""
    with pytest.raises(ConfigError, match="there is no module 'no_such_module'"):
        async with opening("no_such_module:Worker"):
            pass


async def test_settings_that_cannot_travel_are_wrong_settings(opening):
    """Before any process is made that would wait for them."""
    with pytest.raises(ConfigError, match=r"worker_kwargs .* cannot travel"):
        async with opening(worker_kwargs={"fail_in": threading.Lock()}):
            pass


async def test_a_start_that_goes_on_is_not_cut_short(opening):
    """G33: the limit counts from the last progress, however long it takes in all; standing still ends it."""

    class Loads(ProbeWorker):
        def load_model(self):
            stands = self.context.config.rpc_timeout is not None
            for done in range(1000 if stands else 20):
                self.context.progress("weights", min(done, 5) if stands else done, 20)
                time.sleep(self._seconds / 20)

    began = time.monotonic()
    async with opening():
        limit = max(3.0, 4 * (time.monotonic() - began))  # processes that are slow to come alive are no subject here
    settings = {"start_timeout": limit, "worker_kwargs": {"seconds": limit * 4 / 3}}
    began = time.monotonic()
    async with opening(Loads, **settings) as executor:
        assert time.monotonic() - began > limit
        assert await executor.collective_rpc("echo", (1,)) == [1, 1]
    with pytest.raises(CallTimeout) as caught:
        async with opening(Loads, **settings, rpc_timeout=1.0, close_grace=0.1):
            pass
    assert "rank 1 (pid" in "\n".join(caught.value.__notes__)
    assert "is at load_model" in "\n".join(caught.value.__notes__)


async def test_lines_of_a_start_that_fails_have_the_rank(opening, capfd):
    """G59: from the first line on, and JSON stays JSON."""

    class Talks(ProbeWorker):
        def __init__(self, context):
            os.write(1, b'starting\n{"event": "starting"}\n')
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        async with opening(Talks, ranks=1, worker_output="stderr"):
            pass
    err = capfd.readouterr().err.splitlines()
    assert any(line.startswith("(rank 0 pid ") and line.endswith(") starting") for line in err)
    assert '{"event": "starting"}' in err


# -- the environment -------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
async def test_each_rank_has_its_environment(opening, monkeypatch, method):
    """G39: what is given, what is inherited, what tells the ranks apart; before anything is imported."""
    monkeypatch.setenv("SET_BY_THE_PROGRAM", "1")
    monkeypatch.setenv("NOT_FOR_WORKERS", "1")
    monkeypatch.setenv("RANK", "17")
    settings = {"env": {"GIVEN": "yes", "OMP_NUM_THREADS": "3"}, "env_deny": ("NOT_*",), "start_method": method}
    async with opening(**settings) as executor:
        found = await executor.collective_rpc("environment")
    for rank, env in enumerate(found):
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert (env["GIVEN"], env["OMP_NUM_THREADS"], env["SET_BY_THE_PROGRAM"]) == ("yes", "3", "1")
        assert "NOT_FOR_WORKERS" not in env


async def test_ranks_have_chances_of_their_own(opening):
    """A fork copies the state of generators; workers do not share it."""

    def draw(worker):
        import random

        return random.random(), float(np.random.random())  # noqa: NPY002 - it is the global state that matters

    async with opening(preload=("numpy.random", "random")) as executor:
        one, other = await executor.collective_rpc(draw)
    assert one[0] != other[0]
    assert one[1] != other[1]


async def test_ranks_meet_in_a_file_without_a_name(opening):
    """G49: no port; all ranks open the same, which is of this generation alone."""

    def meet(worker):
        path = Path(worker.context.distributed_init_method.removeprefix("file://"))
        with path.open("a") as file:
            file.write(f"{worker.context.rank}\n")
        return path.stat().st_ino

    def read(worker):
        return sorted(Path(worker.context.distributed_init_method.removeprefix("file://")).read_text().split())

    async with opening() as executor:
        assert len(set(await executor.collective_rpc(meet))) == 1
        assert await executor.collective_rpc(read) == [["0", "1"]] * 2


async def test_an_explicit_backend_is_taken_for_one_rank_too(opening):
    """G42: another process, and nobody to meet."""
    async with opening(ranks=1) as executor:
        assert executor.ranks[0].pid != os.getpid()
        (init_method,) = await executor.collective_rpc(lambda worker: worker.context.distributed_init_method)
        assert not init_method


# -- calls -----------------------------------------------------------------------------------


async def test_what_cannot_travel_fails_its_call_alone(opening):
    """There and back; nothing was sent, and the next call is answered."""
    async with opening() as executor:
        with pytest.raises(MessageNotPortable):
            await executor.collective_rpc("echo", (threading.Lock(),))
        with pytest.raises(MessageNotPortable):
            await executor.collective_rpc(lambda worker: threading.Lock())
        assert await executor.collective_rpc("echo", (1,)) == [1, 1]


async def test_async_methods_start_after_the_steps_before_them(opening):
    """The order of one lane holds for the other as far as it must."""
    async with opening() as executor:
        await executor.execute_model(ExecuteModel(StepId(1), {"seconds": 0.2}))
        later = asyncio.ensure_future(executor.collective_rpc("async_block", (0.0, "after")))
        await executor.sample_tokens(StepId(1))
        await later
        (log,) = await executor.collective_rpc("read_log", ranks=[0])
    assert log.index(("executed", 1)) < log.index("after")


async def test_large_values_go_to_all_and_come_back(opening):
    """As arrays, whole."""
    value = np.arange(2_000_000, dtype=np.int64)
    async with opening() as executor:
        for found in await executor.collective_rpc("echo", (value,)):
            assert np.array_equal(found, value)


@pytest.mark.parametrize("way", ["to the worker", "back"])
async def test_the_memory_for_arrays_is_bounded_by_a_setting(opening, way):
    """In both directions, and the error names it; what fits goes on."""
    size = 5 << 20

    def asked(worker):
        return np.zeros(size, np.uint8)

    async with opening(ranks=1, arena_bytes=4 << 20) as executor:
        with pytest.raises(ArenaFull, match=r"send less at once, or raise ExecutorConfig\.arena_bytes") as caught:
            await (
                executor.collective_rpc("echo", (asked(None),))
                if way == "to the worker"
                else executor.collective_rpc(asked)
            )
        assert caught.value.limit == 4 << 20
        (back,) = await executor.collective_rpc("echo", (np.ones(1 << 20, np.uint8),))
        assert back.sum() == 1 << 20


async def test_more_memory_for_arrays_than_usual_is_given_to_both_ends(opening):
    """What the setting allows is allowed in the worker too."""
    async with opening(ranks=1, arena_bytes=3 << 30) as executor:
        assert executor._board.group._writer.statistics().limit == 3 << 30
        (found,) = await executor.collective_rpc(_limits_of_writers)
        assert found == [3 << 30]


async def test_a_group_can_be_looked_at(opening):
    """Its repr names each worker with pid, state and what it does."""
    async with opening() as executor:
        blocked = asyncio.ensure_future(executor.collective_rpc("block", (0.3,)))
        await executor.collective_rpc("async_echo", (1,))
        text = repr(executor._board.group)
        assert f"<WorkerProcess rank 0 pid {executor.ranks[0].pid}: alive, block>" in text
        assert {info.phase for info in executor.ranks} == {"block"}
        await blocked


async def test_things_that_python_passes_over_on_its_path_do_no_harm(opening, monkeypatch):
    """A ``Path`` in ``sys.path`` means nothing here, and nothing to workers."""
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere")])
    for method in ("forkserver", "spawn"):
        async with opening(start_method=method) as executor:
            assert await executor.collective_rpc("echo", (1,)) == [1, 1]


@pytest.mark.parametrize("stream", [None, io.StringIO()], ids=["none", "closed"])
async def test_a_driver_needs_no_standard_error(opening, monkeypatch, stream):
    """A daemon has none, or has closed it: that is nothing to workers."""
    if stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    async with opening() as executor:
        assert await executor.collective_rpc("echo", (1,)) == [1, 1]


async def test_launches_leave_no_answer_to_wait_for(opening):
    """They have none of their own, so the driver polls for the samplings' answers, and for no longer."""
    async with opening(ranks=1, spin=0.001) as executor:
        for step in (1, 2, 3):
            await executor.execute_model(ExecuteModel(StepId(step)))
            await executor.sample_tokens(StepId(step))
        assert repr(executor._board.group._hot).startswith("<HotWindow: 0 answers missing")


async def test_a_worker_that_takes_no_more_messages_is_made_to_end(opening, monkeypatch, caplog):
    """Its control line is full, for it has read nothing for hours: it cannot even be asked."""
    async with opening(close_grace=0.2) as executor:
        worker = executor._board.group._workers[1]

        def send(*_):
            raise ChannelFull("rank 1 control", 4096)

        monkeypatch.setattr(worker.control_line, "send", send)
        with anyio.fail_after(10):
            await executor.close()
        assert not any(state(info.pid) for info in executor.ranks)
    assert "rank 1" in what_closing_said(caplog)[0]


async def test_a_process_that_comes_when_its_group_is_gone_leaves_nothing_behind(leak_check):
    """Its start was under way when that was cut short; the fork server takes it along."""
    worker = WorkerProcess(0, WorkerOutput("rank 0", forwarder("none")), print)
    worker.close()
    worker.started(Started(os.getpid(), os.pidfd_open(os.getpid())))
