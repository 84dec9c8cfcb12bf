"""The graph as a step plane, with actors that do nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading

import graph_stages
import pytest

from aexec.config import ExecutorConfig, ParallelConfig
from aexec.errors import CallTimeout, MessageTooLarge, ProtocolError
from aexec.executor.ray.api import off_loop, ray
from aexec.executor.ray.graph.build import BuiltGraph
from aexec.executor.ray.graph.plane import GraphPlane
from aexec.messages.step import ExecuteModel, SampleTokens, StepResult
from aexec.parallel.layout import RankLayout

pytestmark = [pytest.mark.anyio, pytest.mark.ray]

SOON = 30.0


class Driver:
    """Sends steps, and has their results."""

    def __init__(self, layout, actors, pids, **settings):
        parallel = ParallelConfig(tensor_parallel_size=layout.tensor, pipeline_parallel_size=layout.pipeline)
        config = ExecutorConfig(backend="ray", parallel=parallel, **settings)
        self.layout, self.actors, self.pids, self.step = layout, actors, pids, 0
        self.results, self.answers, self.broken = {}, {}, asyncio.Event()
        self.plane = GraphPlane(
            config,
            actors,
            transport="shm",
            one_node=True,
            store=100 << 20,
            on_reply=self.replied,
            on_failure=self.fail,
            on_break=self.broke,
        )

    def replied(self, call, rank, value):
        ranks = self.answers.setdefault(call, {})
        ranks[rank] = value
        if len(ranks) == self.layout.tensor and not self.results[call].done():
            self.results[call].set_result(ranks)

    def fail(self, call, rank, error):
        self.results[call].set_exception(error)

    def broke(self, rank, error):
        self.why = rank, error
        self.broken.set()

    def send(self, payload=None):
        """Both halves of the next step; what comes of it, by rank of the last stage."""
        self.step += 1
        call, before = 2 * self.step, [0] * self.layout.size
        self.results[call] = asyncio.get_running_loop().create_future()
        self.plane.submit(call - 1, ExecuteModel(self.step, payload, 1), before)
        self.plane.submit(call, SampleTokens(self.step), before)
        return self.results[call]

    async def check(self):
        """A step is right."""
        ranks = await asyncio.wait_for(self.send("here"), SOON)
        last = self.layout.output_rank()
        for place in range(self.layout.tensor):
            incoming = [last - self.layout.tensor + place, "here"] if self.layout.pipeline > 1 else None
            assert ranks[last + place] == StepResult(self.step, [last + place, incoming])

    async def until(self, state):
        """Wait until the graph is there."""
        async with asyncio.timeout(SOON):
            while self.plane.statistics()["state"] != state:  # noqa: ASYNC110 - nobody is told of it
                await asyncio.sleep(0.005)

    async def kill(self):
        for actor in self.actors:
            await off_loop("kill", ray().kill, actor, timeout=SOON)


def make_actors(number):
    ray().cloudpickle.register_pickle_by_value(graph_stages)  # other processes cannot import it
    make = ray().remote(num_cpus=0)(graph_stages.Stage)
    return [make.remote() for _ in range(number)]


@contextlib.asynccontextmanager
async def opened(tensor=2, pipeline=1, **settings):
    layout = RankLayout(tensor, pipeline)
    actors = make_actors(layout.size)
    places = [asyncio.wrap_future(a.become.remote(rank, layout).future()) for rank, a in enumerate(actors)]
    driver = Driver(layout, actors, await asyncio.gather(*places), **settings)
    try:
        await driver.plane.open()
        yield driver
    finally:
        await driver.kill()
        await driver.plane.close()
        await driver.plane.close()
        assert driver.plane.statistics()["state"] == "closed"


async def test_a_step_goes_through_all_stages_and_comes_back():
    """Each rank gets the message, hands on to its place in the next stage, and the last stage answers."""
    async with opened(2, 2) as driver:
        await driver.check()
        assert "graph: built, 0 of 6 in flight, 0 wait" in repr(driver.plane)


async def test_more_than_may_be_in_flight_wait_and_come_in_order():
    """Whatever the number of buffers: none is refused."""
    async with opened() as driver:
        ends = []
        sent = [driver.send() for _ in range(40)]
        for number, result in enumerate(sent):
            result.add_done_callback(lambda _, number=number: ends.append(number))
        async with asyncio.timeout(SOON):
            await asyncio.gather(*sent)
        figures = driver.plane.statistics()
        assert ends == sorted(ends)
        assert (figures["most_in_flight"], figures["in_flight"], figures["waiting"]) == (4, 0, 0)


async def test_waiters_that_leave_take_nothing_along():
    """A hundred in a row, cancelled or timed out: every slot is given back."""
    async with opened() as driver:
        for turn in range(100):
            result = driver.send()
            if turn % 2:
                result.cancel()
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(result, 0)
        await driver.check()
        assert driver.plane.statistics()["in_flight"] == 0


async def test_an_idle_graph_is_released_and_the_next_step_builds_it_again():
    """Twenty times: no hang, no slot and no actor lost."""
    async with opened(1, 2, graph_idle_release=0.01) as driver:
        for _ in range(20):
            await driver.until("released")
            await driver.check()
        assert driver.plane.statistics()["built"] == 21


async def test_steps_that_come_while_it_is_released_wait_for_the_next_graph():
    """They are neither lost nor refused, and keep their order."""
    async with opened(1, graph_idle_release=0.01) as driver:
        await driver.until("being released")
        results = [driver.send() for _ in range(10)]
        async with asyncio.timeout(SOON):
            steps = [(await result)[0].step for result in results]
        assert steps == list(range(1, 11))


async def test_a_graph_with_steps_in_flight_is_not_idle():
    """However long a step takes."""
    async with opened(1, graph_idle_release=0.01) as driver:
        flying = driver.send("hang")
        await driver.until("built")  # it may have been released before the step came
        await asyncio.sleep(0.1)
        assert driver.plane.statistics()["state"] == "built"
        assert not flying.done()


async def test_a_message_above_the_buffer_is_refused_before_it_is_written():
    """Ray would enlarge the channel, and could not take the graph down any more; nobody was sent anything."""
    async with opened(graph_buffer_bytes=1 << 20) as driver:
        with pytest.raises(MessageTooLarge, match=r"raise ExecutorConfig\.graph_buffer_bytes"):
            driver.send("x" * (1 << 20))
        driver.step -= 1
        await driver.check()
        await driver.plane.rest()
        assert driver.plane.statistics()["state"] == "closed"


async def test_a_message_as_large_as_the_buffer_travels_both_ways_and_to_the_next_stage():
    """What is promised fits, with all that Ray adds."""
    async with opened(1, 2, graph_buffer_bytes=1 << 20) as driver:
        for _ in range(8):  # each buffer once
            ranks = await asyncio.wait_for(driver.send("x" * ((1 << 20) - (1 << 13))), SOON)
            assert len(ranks[1].output[1][1]) == (1 << 20) - (1 << 13)
        await driver.plane.rest()
        assert driver.plane.statistics()["state"] == "closed"


async def test_a_graph_that_broke_off_says_whose_part_has_ended():
    """An actor is killed with steps in flight; nothing hangs, and closing is quick."""
    async with opened() as driver:
        for _ in range(3):
            driver.send("hang")
        os.kill(driver.pids[1], signal.SIGKILL)
        await asyncio.wait_for(driver.broken.wait(), SOON)
        assert driver.why[0] == 1
        assert driver.plane.statistics()["state"] == "broken"
        driver.send()  # waits for whoever closes the plane
    assert all(not result.done() or result.cancelled() for result in driver.results.values())


async def test_a_graph_that_cannot_be_built_fails_to_open():
    """Its actors are dead, or the first execution takes too long."""
    layout = RankLayout(1, 1)
    driver = Driver(layout, make_actors(1), [], graph_timeout=0.001)
    with pytest.raises(CallTimeout, match="ray: compile the graph"):
        await driver.plane.open()
    await driver.kill()
    await driver.plane.close()


async def test_a_graph_of_dead_actors_fails_to_open_with_what_ray_says():
    """Whether they die before or while it is compiled; and no actor of Ray's own is left of the attempt."""
    driver = Driver(RankLayout(1, 1), make_actors(1), [])
    await driver.kill()
    with pytest.raises(ProtocolError, match="could not build the graph of the steps: Actor"):
        await driver.plane.open()
    await driver.plane.close()
    async with opened(1, graph_idle_release=0.01) as driver:
        await driver.until("released")
        await driver.kill()
        driver.send()
        await asyncio.wait_for(driver.broken.wait(), SOON)


async def test_a_graph_that_ray_cannot_take_down_is_broken(monkeypatch):
    """Whatever it raises: steps that come later would wait for ever."""
    take_down = BuiltGraph.take_down

    def fail(graph):
        take_down(graph)
        raise RuntimeError("no more threads")

    async with opened(1, graph_idle_release=0.01) as driver:
        monkeypatch.setattr(BuiltGraph, "take_down", fail)
        await asyncio.wait_for(driver.broken.wait(), SOON)
        assert driver.plane.statistics()["state"] == "broken"
        monkeypatch.undo()


async def test_a_graph_that_hangs_while_it_is_built_holds_up_no_other():
    """Executors of one process have nothing to do with each other: an actor of one is stopped."""
    async with opened(1, graph_idle_release=0.01) as held, opened(1, graph_idle_release=0.01) as driver:
        await held.until("released")
        await driver.until("released")
        os.kill(held.pids[0], signal.SIGSTOP)
        waits = held.send()
        await held.until("being built")
        for _ in range(3):
            await driver.check()
            await driver.until("released")
        assert not waits.done()
        os.kill(held.pids[0], signal.SIGCONT)
        await asyncio.wait_for(waits, SOON)


async def test_graphs_that_are_built_at_the_same_time_are_right():
    """Several executors of one process come back to life at once."""
    async with contextlib.AsyncExitStack() as stack:
        drivers = [await stack.enter_async_context(opened(1, graph_idle_release=0.01)) for _ in range(4)]
        for _ in range(3):
            await asyncio.gather(*(driver.until("released") for driver in drivers))
            await asyncio.gather(*(driver.check() for driver in drivers))


async def test_a_fault_in_the_graphs_own_part_breaks_it_off():
    """The call that it belongs to would never end."""
    async with opened(1) as driver:
        driver.send("raise")
        await asyncio.wait_for(driver.broken.wait(), SOON)
        assert "a fault of the graph's own part" in str(driver.why[1])


async def test_a_plane_that_is_not_idle_does_not_rest():
    """It is closed once the actors are dead."""
    async with opened(1) as driver:
        driver.send("hang")
        await driver.plane.rest()
        assert driver.plane.statistics()["state"] == "built"


async def test_a_plane_that_is_abandoned_leaves_no_thread():
    """Its close was cut short: what reads the graph would poll it for ever."""
    async with opened(1) as driver:
        driver.send("hang")
        driver.plane.abandon()
        async with asyncio.timeout(SOON):
            while any(thread.name == "aexec-graph-read" for thread in threading.enumerate()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
