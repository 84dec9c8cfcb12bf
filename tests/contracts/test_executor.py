from __future__ import annotations

import asyncio
import contextlib
import pickle
from functools import partial

import cloudpickle
import pytest

from aexec import ExecutorConfig, ParallelConfig, open_executor
from aexec.executor import WorkerGroup
from aexec.messages.control import Greet, Shutdown
from aexec.testing.call_checks import CALL_CHECKS
from aexec.testing.contracts import EXECUTOR_CHECKS, check_executor
from aexec.testing.life_checks import LIFE_CHECKS
from aexec.testing.nodes import open_on_nodes
from aexec.testing.operation_checks import a_missed_deadline_is_the_end_of_one_call, the_earliest_error_is_the_cause
from aexec.testing.step_checks import STEP_CHECKS, a_worker_without_steps_says_so
from aexec.testing.workers import ProbeWorker, StepProbeWorker
from aexec.worker.context import place_worker
from aexec.worker.worker import WorkerActor

pytestmark = pytest.mark.anyio

# Those that leave an executor as it was: one serves them all, one after the other, where a start takes long.
SHARED_CHECKS = [
    *CALL_CHECKS,
    *(check for check in STEP_CHECKS if check is not a_worker_without_steps_says_so),
    the_earliest_error_is_the_cause,
    a_missed_deadline_is_the_end_of_one_call,
]
OTHER_CHECKS = [check for check in EXECUTOR_CHECKS if check not in SHARED_CHECKS]


def each(checks):
    """A test for each promise, which has its name."""
    return pytest.mark.parametrize("check", checks, ids=lambda check: check.__name__)


class PickleGroup(WorkerGroup):
    """A backend of somebody else: any number of ranks, all messages and answers through pickle."""

    backend = "pickle"

    async def start(self):
        plan, self.refs = self.plan, []
        for rank in range(plan.config.parallel.world_size):
            place = place_worker(
                rank,
                plan.config,
                generation=plan.generation,
                local_rank=rank,
                node_id="here",
                node_ip="127.0.0.1",
            )
            self.refs.append(await plan.actor.spawn(WorkerActor, place, partial(plan.sink.phase, rank), plan.sink.died))
        return [await ref.ask(Greet(), timeout=None) for ref in self.refs]

    def send(self, call, message, ranks):
        encoded = cloudpickle.dumps(message)
        for rank in ranks:
            self.plan.actor.start_task(self._relay(call, rank, encoded))

    async def stop(self, grace):
        alive = [ref for ref in self.refs if ref.is_alive]
        await asyncio.gather(*(ref.ask(Shutdown(grace), timeout=None) for ref in alive))
        await asyncio.gather(*(ref.stop() for ref in alive))
        return []

    async def _relay(self, call, rank, encoded):
        try:
            value = await self.refs[rank].ask(pickle.loads(encoded), timeout=None)
        except Exception as error:
            self.plan.sink.failed(call, rank, pickle.loads(pickle.dumps(error)))
        else:
            self.plan.sink.replied(call, rank, pickle.loads(pickle.dumps(value)))


def make_uni(worker_cls, **settings):
    return open_executor(ExecutorConfig(worker_cls=worker_cls, **settings))


def make_pickle(worker_cls, **settings):
    layout = ParallelConfig(pipeline_parallel_size=3)
    return open_executor(ExecutorConfig(backend=PickleGroup, worker_cls=worker_cls, parallel=layout, **settings))


def make_mp(worker_cls, **settings):
    layout = ParallelConfig(tensor_parallel_size=2)
    return open_executor(ExecutorConfig(backend="mp", worker_cls=worker_cls, parallel=layout, **settings))


def make_mp_pipeline(worker_cls, **settings):
    layout = ParallelConfig(pipeline_parallel_size=3)
    return open_executor(ExecutorConfig(backend="mp", worker_cls=worker_cls, parallel=layout, **settings))


def make_mp_afresh(worker_cls, **settings):
    return make_mp_pipeline(worker_cls, **{"start_method": "spawn"} | settings)


@contextlib.asynccontextmanager
async def lending(make):
    """Like ``make``, but for one executor that all have who want nothing special."""
    async with make(StepProbeWorker) as shared:

        @contextlib.asynccontextmanager
        async def lent():
            await shared.collective_rpc(lambda worker: worker.log.clear())
            yield shared

        def lend(worker_cls, **settings):
            return lent() if not settings and issubclass(StepProbeWorker, worker_cls) else make(worker_cls, **settings)

        yield lend


@each(EXECUTOR_CHECKS)
async def test_uni_keeps_its_promises(check):
    """The executor in this process passes the contract that all executors share."""
    await check(make_uni)


@pytest.fixture(scope="module")
async def lend_mp(anyio_backend):
    """Two ranks that are forked."""
    async with lending(make_mp) as lend:
        yield lend


@each(SHARED_CHECKS)
async def test_calls_and_steps_on_mp_keep_their_promises(check, lend_mp):
    """Two ranks that are forked, each in a process of its own, pass the same contract: one after the other on one group."""
    await check(lend_mp)


@each(OTHER_CHECKS)
async def test_mp_keeps_its_promises(check):
    """And all of the rest."""
    await check(make_mp)


@pytest.fixture(scope="module")
async def lend_stages(anyio_backend):
    """Three stages, in fresh interpreters."""
    async with lending(make_mp_afresh) as lend:
        yield lend


@each(SHARED_CHECKS)
async def test_calls_and_steps_on_mp_in_stages_keep_their_promises(check, lend_stages):
    """And so do three stages in fresh interpreters."""
    await check(lend_stages)


@each(OTHER_CHECKS)
async def test_mp_in_stages_keeps_its_promises(check):
    """Operations are those of any process; starts, deaths and ends those of a fresh interpreter."""
    await check(make_mp_afresh if check in LIFE_CHECKS else make_mp_pipeline)


def make_nodes(worker_cls, **settings):
    layout = ParallelConfig(tensor_parallel_size=2)
    return open_on_nodes(ExecutorConfig(worker_cls=worker_cls, parallel=layout, nnodes=2, **settings))


@pytest.fixture(scope="module")
async def lend_nodes(anyio_backend):
    """A rank on each of two nodes."""
    async with lending(make_nodes) as lend:
        yield lend


@each(SHARED_CHECKS)
async def test_calls_and_steps_of_mp_on_two_nodes_keep_their_promises(check, lend_nodes):
    """MN-01: a rank on each of two nodes, with an encrypted line between them: calls and steps, on one group."""
    await check(lend_nodes)


@each(OTHER_CHECKS)
async def test_mp_on_two_nodes_keeps_its_promises(check):
    """And all of the rest."""
    await check(make_nodes)


@pytest.fixture(scope="module", params=["channel", "compiled_graph"])
def make_ray(request, ray_cluster):
    """Workers that Ray has placed, by each way in which a step takes to them."""

    def make(worker_cls, **settings):
        layout = ParallelConfig(tensor_parallel_size=2)
        by = {
            "backend": "ray",
            "ray_step_plane": request.param,
            "graph_buffer_bytes": 1 << 20,
            "placement_timeout": 30.0,
        }
        return open_executor(ExecutorConfig(worker_cls=worker_cls, parallel=layout, **by | settings))

    return make


@pytest.fixture(scope="module")
async def lend_ray(anyio_backend, make_ray):
    """A start takes Ray seconds."""
    async with lending(make_ray) as lend:
        yield lend


@pytest.mark.ray
@each(SHARED_CHECKS)
async def test_calls_and_steps_on_ray_keep_their_promises(check, lend_ray):
    """Workers that Ray has placed pass the contract too: calls and steps, one after the other on one group."""
    await check(lend_ray)


@pytest.mark.ray
@each(OTHER_CHECKS)
async def test_ray_keeps_its_promises(check, make_ray):
    """And all of the rest."""
    await check(make_ray)


@each(EXECUTOR_CHECKS)
async def test_a_third_party_executor_keeps_the_promises(check):
    """G58: forty lines that bring workers about and carry messages get all the rest."""
    await check(make_pickle)


async def test_a_broken_promise_is_named():
    """An executor that loses its last rank's answers fails the suite, which says at which rule."""

    class Lossy(PickleGroup):
        def send(self, call, message, ranks):
            super().send(call, message, [rank for rank in ranks if rank < 2 or isinstance(message, Greet)])

    def make(worker_cls, **settings):
        layout = ParallelConfig(pipeline_parallel_size=3)
        settings = {"backend": Lossy, "parallel": layout, "start_timeout": 0.3, "close_grace": 0.5} | settings
        return open_executor(ExecutorConfig(worker_cls=worker_cls, **settings))

    with pytest.raises(
        AssertionError, match=r"replies_come_in_rank_order: .*the start of the workers passed its limit"
    ):
        await check_executor(make)


async def test_the_suite_can_be_run_in_one_call():
    """What a third party writes in its own tests."""
    assert {check.__name__ for check in EXECUTOR_CHECKS} >= {"a_death_ends_all_waiters_at_once", "it_is_a_library"}
    async with make_uni(ProbeWorker) as executor:
        assert await executor.collective_rpc("place") == [(0, 1, 0, 0, 1)]
