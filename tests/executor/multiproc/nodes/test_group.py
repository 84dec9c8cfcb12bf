"""An executor over two nodes, whose agents live in this process, at loopback addresses of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal

import numpy as np
import pytest
from stopwatch import Stopwatch

from aexec import ExecutorConfig, ParallelConfig, Restart
from aexec.assemble import open_executor
from aexec.errors import (
    CallTimeout,
    ConfigError,
    ExecutorClosed,
    ExecutorUnavailable,
    NodeRefused,
    RemoteError,
    WorkerDied,
)
from aexec.executor.handle import start_executor
from aexec.executor.multiproc.nodes.group import NodesGroup
from aexec.messages.batch import GrammarOutput
from aexec.messages.step import ExecuteModel, StepId
from aexec.testing.expect import eventually
from aexec.testing.nodes import loopback_address, open_on_nodes
from aexec.testing.processes import state_of
from aexec.testing.workers import ConnectorProbeWorker, ProbeWorker, StepProbeWorker
from aexec.transport.curve import NodeKey

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leak_check"), pytest.mark.timeout(90)]


@contextlib.asynccontextmanager
async def two_nodes(worker_cls=ProbeWorker, ranks=2, **settings):
    """An executor, and the agent of the other node."""
    settings = {"nnodes": 2, "worker_output": "none", "close_grace": 0.5} | settings
    config = ExecutorConfig(parallel=ParallelConfig(pipeline_parallel_size=ranks), worker_cls=worker_cls, **settings)
    nodes = []
    async with open_on_nodes(config, told=nodes.extend) as executor:
        yield executor, nodes[0]


async def is_stopped(pid):
    async def look():
        return await asyncio.to_thread(state_of, pid) == "T"

    await eventually(look, "it stops")


async def test_ranks_of_two_nodes_are_one_group():
    """Each has its place in the world and on its node, and it is to be seen which is where."""
    async with two_nodes(ranks=4) as (executor, node):
        places = await executor.collective_rpc(lambda worker: (worker.context.rank, worker.context.local_rank))
        assert places == [(0, 0), (1, 1), (2, 0), (3, 1)]
        seen = await executor.collective_rpc(
            lambda worker: (worker.context.num_local_ranks, os.environ["LOCAL_WORLD_SIZE"], os.environ["WORLD_SIZE"])
        )
        assert seen == [(2, "2", "4")] * 4
        addresses = await executor.collective_rpc(lambda worker: worker.context.node_ip)
        assert addresses == [executor.config.master_addr] * 2 + [node.options.address] * 2
        meetings = set(await executor.collective_rpc(lambda worker: worker.context.distributed_init_method))
        assert len(meetings) == 1
        assert meetings.pop().startswith(f"tcp://{executor.config.master_addr}:")
        assert len(set(await executor.collective_rpc(lambda worker: worker.context.group_secret))) == 1
        told = executor.describe()
        names = [f"0 ({os.uname().nodename}, {executor.config.master_addr})"] * 2
        names += [f"1 ({os.uname().nodename}, {node.options.address})"] * 2
        assert [place.node for place in told.places] == names
        assert [place.pid for place in told.places] == [info.pid for info in executor.ranks]
        assert f"rank 3: node {names[3]}, pid {executor.ranks[3].pid}, device auto" in str(told)
        assert told["ranks_per_node"].value == (2, 2)
        assert [info.node for info in executor.ranks] == [f"node {name}" for name in names]
    assert node.end == "the executor is closed"


async def test_a_message_goes_to_the_ranks_that_it_is_for():
    """All, those of one node, and some of each; the answers come in rank order."""
    async with two_nodes(ranks=4) as (executor, _):
        for ranks in ([0, 1, 2, 3], [0], [2, 3], [3], [1, 2], [0, 1, 3]):
            await executor.collective_rpc("note", (str(ranks),), ranks=ranks)
            assert await executor.collective_rpc(lambda worker: worker.context.rank, ranks=ranks) == ranks
        assert await executor.collective_rpc("echo", (7,), reply_rank=3) == [7]
        logs = await executor.collective_rpc("read_log")
    for rank, log in enumerate(logs):
        assert [entry for entry in log if entry.startswith("[")] == [
            text for text in ("[0, 1, 2, 3]", "[0]", "[2, 3]", "[3]", "[1, 2]", "[0, 1, 3]") if str(rank) in text
        ]


@pytest.mark.parametrize("ranks_per_node", [[1, 2], [2, 1]])
async def test_only_the_node_that_samples_gets_the_bitmask(ranks_per_node):
    """SO-06, STEP-06: on it the rank that samples; all others are told to go on, in the same order."""
    async with two_nodes(ConnectorProbeWorker, ranks=3, ranks_per_node=ranks_per_node) as (executor, _):
        for number in (1, 2, 3):
            bitmask = np.full((number, 1), number, dtype=np.int32)
            grammar = GrammarOutput(request_ids=[f"r{row}" for row in range(number)], bitmask=bitmask)
            await executor.execute_model(ExecuteModel(StepId(number)))
            await executor.sample_tokens(StepId(number), grammar if number != 2 else None)
        logs = await executor.collective_rpc(lambda worker: [entry for entry in worker.log if entry[0] == "sample"])
    assert logs[2] == [("sample", 1, 1), ("sample", 2, None), ("sample", 3, 3)]
    assert logs[0] == logs[1] == [("sample", 1, None), ("sample", 2, None), ("sample", 3, None)]


async def test_large_values_go_there_and_back():
    """In pieces, beside what is small, and equal on all nodes."""
    value = np.arange(3 << 20, dtype=np.int32)  # 12 MB
    async with two_nodes() as (executor, _):
        answers = await asyncio.gather(
            executor.collective_rpc("echo", (value,)), *(executor.collective_rpc("echo", (n,)) for n in range(20))
        )
    assert all(np.array_equal(each, value) for each in answers[0])
    assert answers[1:] == [[n, n] for n in range(20)]


async def test_health_is_answered_while_a_large_message_is_under_way():
    """It passes what goes to the node, and its answer what comes from there: a rank is not stuck that has much to hear."""
    value = np.zeros(40 << 20, dtype=np.uint8)
    async with two_nodes() as (executor, _):
        call = asyncio.ensure_future(executor.collective_rpc("echo", (value,)))
        asked = 0
        while not call.done():
            assert bool(await executor.check_health())
            assert len(await executor.stacks()) == 2
            asked += 1
        assert asked > 1
        assert [each.nbytes for each in await call] == [value.nbytes] * 2


async def test_what_a_rank_elsewhere_does_is_seen_from_here():
    """G64: its phase, its health, and its stack, while its compute thread is busy; a stopped one is stuck."""
    async with two_nodes() as (executor, _):
        call = asyncio.ensure_future(executor.collective_rpc("block_until_cancelled", (30.0,), ranks=[1]))

        async def is_at_work():
            return (await executor.check_health()).ranks[1].phase == "block_until_cancelled"

        await eventually(is_at_work, "it blocks")
        assert executor.ranks[1].phase == "block_until_cancelled"
        assert "in block" in (await executor.stacks())[1]
        assert re.search(r"rank 1: pid \d+ on node 1 \(.*block", executor.dump())
        assert await executor.collective_rpc("async_echo", (1,), timeout=10.0) == [1, 1]
        assert not call.done()
        os.kill(executor.ranks[1].pid, signal.SIGSTOP)
        try:
            await is_stopped(executor.ranks[1].pid)
            report = await executor.check_health(timeout=1.0)  # in which the other rank has to be heard
            assert [rank.state for rank in report.ranks] == ["alive", "stuck"]
        finally:
            os.kill(executor.ranks[1].pid, signal.SIGCONT)
        call.cancel()
        await asyncio.wait([call])


async def test_an_error_elsewhere_is_an_error_here():
    """With its type, its rank and its traceback, at once, whoever else is busy."""
    async with two_nodes() as (executor, _):
        with Stopwatch() as watch, pytest.raises(RemoteError) as caught:
            await executor.collective_rpc("fail_or_block", (1, 2.0))
        assert watch.seconds < 1.0
        assert caught.value.rank == 1
        assert "fail_or_block" in caught.value.traceback_text
        with pytest.raises(ZeroDivisionError, match="division"):
            await executor.collective_rpc(lambda worker: worker.context.rank or 1 // 0, ranks=[0])
        with pytest.raises(ZeroDivisionError, match="division"):
            await executor.collective_rpc(lambda worker: 1 // (1 - worker.context.rank), ranks=[1])


async def test_a_death_elsewhere_is_a_death_here():
    """MN-05: with rank, node, signal and phase; the node's agent is told that the executor has failed."""
    async with two_nodes() as (executor, node):
        call = asyncio.ensure_future(executor.collective_rpc("block", (30.0,)))
        await eventually(lambda: _phase_is(executor, 1, "block"), "it blocks")
        pid = executor.ranks[1].pid
        with Stopwatch() as watch:
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(WorkerDied) as caught:
                await call
        assert watch.seconds < 1.0
        error = caught.value
        assert (error.rank, error.pid, error.signal, error.phase) == (1, pid, "SIGKILL", "block")
        assert error.node == f"1 ({os.uname().nodename}, {node.options.address})"
        report = await executor.check_health()
        assert report.ranks[1].state == "dead"
    assert isinstance(node.end, ExecutorClosed)
    assert "WorkerDied" in str(node.end)


async def _phase_is(executor, rank, phase):
    return executor.ranks[rank].phase == phase


async def test_a_node_that_leaves_takes_its_ranks_along():
    """Whoever ends it there is named here."""
    async with two_nodes(ranks=3, ranks_per_node=[1, 2]) as (executor, node):
        call = asyncio.ensure_future(executor.collective_rpc("async_block", (30.0,)))
        leaving = asyncio.ensure_future(node.leave("SIGTERM"))
        with pytest.raises(
            WorkerDied, match=r"rank 1 .*node 1 .* is lost: its agent was told to end there \(SIGTERM\)"
        ):
            await call
        await leaving
        report = await executor.check_health()
        assert [rank.state for rank in report.ranks][1:] == ["dead", "dead"]


async def test_a_living_agent_has_the_next_generation():
    """A worker that dies elsewhere costs a restart; its node needs nobody's help."""
    async with two_nodes(on_failure=Restart(backoff=0.0)) as (executor, node):
        pids = [info.pid for info in executor.ranks]
        with pytest.raises(WorkerDied):
            await executor.collective_rpc("end", (3,), kwargs={"rank": 1})
        await eventually(lambda: _is_up(executor, 2), "it is up again")
        assert await executor.collective_rpc("echo", (1,)) == [1, 1]
        assert not set(pids) & {info.pid for info in executor.ranks}
    assert node.end == "the executor is closed"


async def _is_up(executor, generation):
    with contextlib.suppress(ExecutorUnavailable):
        return executor.generation == generation and bool(await executor.check_health())


async def test_a_node_that_was_lost_may_come_again():
    """Reconnecting is joining anew, and the next generation waits for it."""
    async with two_nodes(on_failure=Restart(backoff=0.0)) as (executor, node):
        await node.leave()
        await eventually(lambda: _is_waiting(executor), "it is waited for")
        assert re.fullmatch(
            r"waiting for node 1: run `aexec worker --nnodes 2 --node-rank 1 --master-addr 127\S+ --master-port 29501 "
            r"--key-file \S+` there",
            executor.ranks[1].phase,
        )
        again = node.again()
        again.start()
        await eventually(lambda: _is_up(executor, 2), "it is up again")
        assert await executor.collective_rpc("echo", (1,)) == [1, 1]
        await executor.close()
        await again.ended()
    assert again.end == "the executor is closed"


async def _is_waiting(executor):
    return executor.ranks[1].phase.startswith("waiting for node 1")


async def test_a_second_node_of_one_number_is_refused():
    """On either side with the reason; the one that is there does not notice."""
    async with two_nodes() as (executor, node):
        second = node.again()
        second.start()
        await second.ended_by_itself()
        assert isinstance(second.end, NodeRefused)
        assert "there is a node 1 already" in str(second.end)
        assert await executor.collective_rpc("echo", (1,)) == [1, 1]


async def test_a_close_ends_stopped_ranks_elsewhere(caplog):
    """Promise 8: within its budget on all nodes, and it says where it needed force."""
    async with two_nodes(ranks=3, ranks_per_node=[1, 2], close_grace=0.2, term_grace=0.3) as (executor, _):
        os.kill(executor.ranks[1].pid, signal.SIGSTOP)
        await is_stopped(executor.ranks[1].pid)
        pids = [info.pid for info in executor.ranks]
        with Stopwatch() as watch:
            await asyncio.gather(executor.close(), executor.close())
        assert watch.seconds < 2.0
        assert {await asyncio.to_thread(state_of, pid) for pid in pids} <= {"", "Z"}
    (said,) = [record.aexec["what"] for record in caplog.records if "what" in getattr(record, "aexec", {})][-1:]
    assert re.search(r"node 1 \(.*\): rank 1 \(pid \d+\), idle, was stopped by a signal", said)


# -- the start -------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["__init__", "load_model"])
async def test_a_failed_start_elsewhere_is_raised_here(where):
    """With type and rank; the other node is told, and has nothing left."""

    class Picky(ProbeWorker):
        def __init__(self, context):
            super().__init__(context, fail_in=where if context.rank == 1 else "")

    nodes = []
    config = ExecutorConfig(nnodes=2, parallel=ParallelConfig(pipeline_parallel_size=2), worker_cls=Picky)
    with pytest.raises(RemoteError, match=where) as caught:
        async with open_on_nodes(config, told=nodes.extend):
            pass
    assert caught.value.rank == 1
    assert type(caught.value).__name__ == "RemoteError[ProbeError]"
    assert isinstance(nodes[0].end, ExecutorClosed)
    assert f"{where} was told to fail" in str(nodes[0].end)


async def test_an_executor_that_waits_says_for_whom(tmp_path):
    """The limit of a start counts from the last node that came; the error has the command that is missing."""
    seen = []
    with pytest.raises(CallTimeout) as caught:
        await start_executor(
            await _config(tmp_path, start_timeout=0.3), NodesGroup, lambda phase, *_: seen.append(phase)
        )
    assert [phase for phase in seen if phase.startswith("waiting for node 1: run `aexec worker --nnodes 2")]
    notes = "\n".join(caught.value.__notes__)
    assert "rank 1 (pid 0) is at waiting for node 1: run `aexec worker --nnodes 2 --node-rank 1 --master-addr" in notes
    assert "rank 0 (pid 0) is at waiting for other nodes" in notes


async def test_a_long_wait_for_a_node_is_logged(tmp_path, monkeypatch, caplog):
    """Whoever looks at no progress would not know that it is their turn; once, with the command."""
    monkeypatch.setattr("aexec.executor.multiproc.nodes.group._PATIENCE", 0.05)
    with pytest.raises(CallTimeout):
        await open_executor(await _config(tmp_path, start_timeout=0.4))
    said = [record.aexec for record in caplog.records if "waiting for a node" in record.getMessage()]
    assert [(each["node"], each["run"][:35]) for each in said] == [(1, "aexec worker --nnodes 2 --node-rank")]


async def _config(tmp_path, **settings):
    await asyncio.to_thread(NodeKey.make, tmp_path / "key")
    return ExecutorConfig(
        nnodes=2, master_addr=loopback_address(), node_key_file=str(tmp_path / "key"), worker_cls=StepProbeWorker,
        parallel=ParallelConfig(pipeline_parallel_size=2), **settings,
    )  # fmt: skip


async def test_a_port_that_is_taken_names_its_owner(tmp_path):
    """Nothing is probed ahead: the bind itself says so."""
    config = await _config(tmp_path)
    server = await asyncio.start_server(lambda *_: None, config.master_addr, config.master_port)
    async with server:
        with pytest.raises(ConfigError, match=rf"master_port 29501 of 127\S+ is taken by pid {os.getpid()} .*or 0"):
            await open_executor(config)


async def test_a_port_may_be_left_to_the_kernel(tmp_path):
    """It is bound first, and then told."""
    seen = []
    config = await _config(tmp_path, start_timeout=0.3, master_port=0)
    with pytest.raises(CallTimeout):
        await open_executor(config, progress=lambda phase, *_: seen.append(phase))
    ports = {port for phase in seen for port in re.findall(r"--master-port (\d+)", phase)}
    assert len(ports) == 1
    assert int(ports.pop()) > 1023


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"node_rank": 1, "master_addr": "10.0.0.5"},
            r"run `aexec worker --nnodes 2 --node-rank 1 --master-addr 10.0.0.5",
        ),
        ({"nnodes": 3}, "2 ranks do not divide among 3 nodes"),
        ({"node_key_file": "/no/such/file"}, "'/no/such/file' cannot be read"),
    ],
)
async def test_what_cannot_work_is_refused_before_anything_starts(settings, text):
    """With what to do instead."""
    config = ExecutorConfig(parallel=ParallelConfig(pipeline_parallel_size=2), **{"nnodes": 2} | settings)
    with pytest.raises(ConfigError, match=text):
        await open_executor(config)
