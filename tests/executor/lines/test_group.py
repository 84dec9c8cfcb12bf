"""A group of ranks that have lines and no processes: what a backend gets, and what it may do otherwise."""

from __future__ import annotations

import threading

import anyio
import pytest

from aexec import ExecutorConfig, ParallelConfig
from aexec.errors import ConfigError, WorkerDied
from aexec.executor.group import GroupPlan
from aexec.executor.lines.group import LineGroup
from aexec.executor.lines.launch import launch_of
from aexec.executor.lines.rank import RankLines
from aexec.messages.control import CallMethod, Greet, Hello, Ping, Shutdown
from aexec.messages.process import Ended, Launch, PhaseReached
from aexec.messages.step import ExecuteModel, SampleTokens, StepId
from aexec.transport import Kind, LoopChannel, Writer, seqpacket_pair
from aexec.worker.context import place_worker

pytestmark = pytest.mark.anyio


class News:
    """Keeps what comes, in order."""

    def __init__(self):
        self.items = []
        self._more = anyio.Event()

    def add(self, item):
        self.items.append(item)
        self._more.set()

    async def until(self, ready):
        with anyio.fail_after(10):
            while not ready():
                self._more = anyio.Event()
                await self._more.wait()


class Sink(News):
    """Keeps what it is told."""

    def __getattr__(self, name):
        return lambda *facts: self.add((name, *facts))

    def all_of(self, name):
        return [facts[1:] for facts in self.items if facts[0] == name]


class Rank(RankLines):
    """Notes that it was made to end."""

    was_ended = False
    is_halted = False

    def _make_end(self):
        self.was_ended = True

    def _obituary(self):
        words = self._last_words
        return WorkerDied(self.rank, self.pid, words.exit_code if words else None, None, self.doing, self.work.step)


class Far(News):
    """The other ends of a rank's lines, with what came."""

    def __init__(self, work, control, writer):
        super().__init__()
        self.work = LoopChannel(work, writer, lambda frame: self.add(("work", frame)), print)
        self.control = LoopChannel(control, writer, lambda frame: self.add(("control", frame)), print)
        for line in (self.work, self.control):
            line.open()

    async def hears(self, number, line=None):
        """The values of what came, once there are so many; of one line, or of both."""
        await self.until(lambda: len(self.items) >= number)
        return [frame.value for by, frame in self.items if by == (line or by)]

    def answer(self, call, value, line="work"):
        getattr(self, line).send(Kind.REPLY, call, value)


class Group(LineGroup[Rank]):
    """Two ranks, at whose other ends the test is."""

    backend = "lines"
    brought_down = 0

    def __init__(self, plan, **settings):
        super().__init__(plan, **settings)
        self.far_writer = Writer()
        self.far = []
        for place_of_it, rank in enumerate(settings.get("ranks", range(self._ranks))):
            (work, far_work), (control, far_control) = seqpacket_pair(), seqpacket_pair()
            self._workers.append(Rank(rank, self._died))
            self._connect(self._workers[place_of_it], work, control)
            self.far.append(Far(far_work, far_control, self.far_writer))

    async def start(self):
        for worker in self._workers:
            self._launch(worker, launch_of(place(worker.rank, self.plan.config), local_world_size=2, spin=0.0))
        for far, worker in zip(self.far, self._workers, strict=True):
            await far.hears(2)
            far.answer(-1, hello(worker.rank), "control")
        return await self._all_greeted()

    async def _bring_down(self, grace):
        self.brought_down += 1
        for worker in self._workers:
            if worker.can_be_told:
                self._ask_to_end(worker, grace)
        return ["a line"]


def hello(rank):
    methods = {"plain": False, "beside": True}
    return Hello(rank=rank, pid=1, node="here", worker="W", methods=methods)


def place(rank, config):
    return place_worker(rank, config, generation=1, local_rank=rank, node_id="here", node_ip="127.0.0.1")


@pytest.fixture
async def make_group(leak_check):
    """Makes groups; they are closed after the test."""
    made = []

    def make(group=Group, tensor=2, ranks=None, **settings):
        config = ExecutorConfig(parallel=ParallelConfig(tensor_parallel_size=tensor), **settings)
        held = {} if ranks is None else {"ranks": ranks}
        made.append(group(GroupPlan(config, 1, None, Sink()), **held))
        return made[-1]

    yield make
    for group in made:
        await group.stop(0.0)
        for far in group.far:
            far.work.close()
            far.control.close()
        group.far_writer.close()


async def started(group):
    """It has greeted all, and nothing of that is in the way."""
    await group.start()
    for far in group.far:
        far.items.clear()
    return group


def call(number, method):
    return number, CallMethod(call=number, method=method)


async def test_a_launch_and_a_greeting_are_what_a_worker_hears_first(make_group):
    """The hellos come in rank order; then nobody is starting any longer."""
    group = make_group()
    hellos = await group.start()
    assert [each.rank for each in hellos] == [0, 1]
    for far in group.far:
        kinds = {type(frame.value): frame.kind for _, frame in far.items}
        assert kinds == {Launch: Kind.LAUNCH, Greet: Kind.MESSAGE}
    assert group.phases() == {0: "idle", 1: "idle"}


async def test_each_message_goes_down_the_line_that_it_belongs_to(make_group):
    """Steps and plain calls in order; what is asked beside them knows the steps that were sent before it."""
    group = await started(make_group())
    group.send(1, ExecuteModel(StepId(1)), (0, 1))
    group.send(*call(2, "plain"), (0, 1))
    group.send(3, SampleTokens(StepId(1)), (0, 1))
    group.send(*call(4, "beside"), (0, 1))
    group.send(5, Ping(), (0, 1))
    for far in group.far:
        work, control = await far.hears(5, "work"), await far.hears(5, "control")
        assert [type(value) for value in work] == [ExecuteModel, CallMethod, SampleTokens]
        assert [type(value) for value in control] == [CallMethod, Ping]
        assert (work[1].after, control[0].after) == (0, 2)


async def test_a_backend_may_send_steps_by_another_road(make_group):
    """Then plain calls say how many steps came before them, and each rank's count of calls goes with the steps."""

    class Apart(Group):
        _plain_calls_wait = True

        def _send_step(self, call, message, workers):
            self.road.append((call, message.step, [worker.work.calls for worker in self._workers]))
            self._steps += 1

    group = make_group(Apart)
    group.road = []
    await started(group)
    group.send(1, ExecuteModel(StepId(1)), (0, 1))
    group.send(*call(2, "plain"), (0, 1))
    group.send(*call(3, "plain"), (1,))
    group.send(4, SampleTokens(StepId(1)), (0, 1))
    group.send(*call(5, "plain"), (0,))
    assert group.road == [(1, 1, [0, 0]), (4, 1, [1, 2])]
    assert [value.after for value in await group.far[0].hears(2)] == [1, 2]
    assert [value.after for value in await group.far[1].hears(2)] == [1, 1]


async def test_a_group_may_hold_some_ranks_of_a_larger_world(make_group):
    """All that is said of a rank goes by its number in the world, and a message for all of its ranks goes once to each."""
    group = await started(make_group(tensor=5, ranks=range(2, 4)))
    group.send(*call(1, "plain"), (2, 3))
    group.send(*call(2, "beside"), (3,))
    assert group.phases() == {2: "plain", 3: "plain"}
    assert [value.call for value in await group.far[0].hears(1)] == [1]
    assert sorted(value.call for value in await group.far[1].hears(2)) == [1, 2]
    group.far[0].answer(1, "a")
    group.far[1].work.close()
    group.far[1].control.close()
    error = await death(group)
    assert error.rank == 3
    assert group.plan.sink.all_of("replied") == [(1, 2, "a")]


async def test_answers_reach_the_sink_and_end_what_the_rank_does(make_group):
    """By whichever line they come."""
    group = await started(make_group())
    group.send(*call(1, "plain"), (0, 1))
    group.send(*call(2, "beside"), (1,))
    assert group.phases() == {0: "plain", 1: "plain"}
    await group.far[1].hears(2)
    group.far[0].answer(1, "a")
    group.far[1].answer(2, "b", "control")
    group.far[1].answer(1, "c")
    await group.plan.sink.until(lambda: len(group.plan.sink.all_of("replied")) == 3)
    assert sorted(group.plan.sink.all_of("replied")) == [(1, 0, "a"), (1, 1, "c"), (2, 1, "b")]
    assert group.phases() == {0: "idle", 1: "idle"}


async def death(group):
    await group.plan.sink.until(lambda: group.plan.sink.all_of("died"))
    ((error,),) = group.plan.sink.all_of("died")
    return error


async def test_a_broken_line_is_a_death(make_group):
    """Told once, with what the rank was doing; and its process, if there still is one, is made to end."""
    group = await started(make_group())
    group.send(*call(1, "plain"), (0, 1))
    group.far[1].work.close()
    group.far[1].control.close()
    error = await death(group)
    assert (error.rank, error.phase) == (1, "plain")
    assert group._workers[1].was_ended
    assert not group._workers[1].can_be_told
    assert repr(group._workers[1]) == "<Rank rank 1 pid 0: ending, plain>"


async def test_last_words_say_more_than_a_broken_line(make_group):
    """The exit code that worker code has chosen, for what it was called; phases are told as they come."""
    group = make_group()
    group.far[0].work.send(Kind.EVENT, 0, PhaseReached("import"))
    group.far[0].work.send(Kind.EVENT, 0, Ended(exit_code=7, phase="import"))
    assert (await death(group)).exit_code == 7
    assert group.plan.sink.all_of("phase") == [(0, "import")]


async def test_who_stops_a_group_hears_of_no_deaths(make_group):
    """All are asked to end; a second stop waits for the first, and finds nothing to do."""
    group = await started(make_group())
    lines = []

    async def stop():
        lines.append(await group.stop(3.0))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop)
        tasks.start_soon(stop)
    assert lines == [["a line"], []]
    assert group.brought_down == 1
    assert await group.far[0].hears(1) == [Shutdown(3.0)]
    assert not group.plan.sink.all_of("died")


async def test_a_start_that_cannot_travel_says_what_to_give_instead(make_group):
    """A lock among a worker's arguments is its user's to mend."""
    with pytest.raises(ConfigError, match=r"worker_cls, worker_kwargs or worker_init cannot travel .* Give names"):
        await make_group(worker_kwargs={"lock": threading.Lock()}).start()
