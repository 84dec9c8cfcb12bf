"""Roads: one order made of step messages by a graph and plain calls by the work line."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from aexec.errors import ChannelClosed, MessageTooLarge, PeerLost, ProtocolError
from aexec.messages.batch import GrammarOutput
from aexec.messages.control import CallMethod
from aexec.messages.step import ExecuteModel, SampleTokens, StepId, StepResult
from aexec.parallel.handoff import NOTHING, Travelling
from aexec.parallel.layout import RankLayout
from aexec.transport import BlockingChannel, Frame, Kind, Writer, seqpacket_pair
from aexec.transport.flat import restore
from aexec.worker.rank import RankState
from aexec.worker.roads import WAKE, Roads, step_message

LIMIT = 1 << 20
SOON = 10.0


class Rig:
    """A rank's roads, the driver's end of its work line, and graph threads."""

    def __init__(self, rank: int, layout: RankLayout, *, samples: bool = True) -> None:
        ends = seqpacket_pair()
        self.writer = Writer()
        self.driver = BlockingChannel(ends[0], self.writer, name="driver")
        self.line = BlockingChannel(ends[1], self.writer, name="worker")
        self.state = RankState(rank)
        self.state.host = _Host(samples)  # type: ignore[assignment] # a stand-in for what Roads asks of it
        self.roads = Roads(self.line, self.state, layout)
        self.roads.allow(LIMIT)
        self.size = layout.size
        self.threads: list[threading.Thread] = []

    def by_graph(
        self, call: int, message: ExecuteModel | SampleTokens, before: int = 0, incoming: Travelling = NOTHING
    ) -> Future[Travelling]:
        """Bring a step message on a thread of the graph's; what comes out."""
        return self.take(step_message(call, message, [before] * self.size, LIMIT), incoming)

    def take(self, data: bytes, incoming: Travelling = NOTHING) -> Future[Travelling]:
        outcome: Future[Travelling] = Future()
        thread = threading.Thread(target=lambda: outcome.set_result(self.roads.take(data, incoming)))
        thread.start()
        self.threads.append(thread)
        return outcome

    def by_line(self, call: int, after: int) -> None:
        """Send a plain call."""
        self.driver.send(Kind.MESSAGE, call, CallMethod(call=call, method="f", after=after))

    def next(self) -> Frame:
        """What the device's thread gets; woken for nothing it comes again, as that does."""
        while (frame := self.roads.receive()) is None:
            pass
        return frame

    def close(self) -> None:
        self.roads.close()
        for thread in self.threads:
            thread.join(SOON)
            assert not thread.is_alive()
        self.line.close()
        self.driver.close()
        self.writer.close()


class _Host:
    class context:  # noqa: N801 - an attribute
        device = "cpu"

    def __init__(self, samples: bool) -> None:
        self.samples = samples


Make = Callable[..., Rig]


@pytest.fixture
def make() -> Generator[Make]:
    rigs: list[Rig] = []

    def made(rank: int = 0, *, tensor: int = 1, pipeline: int = 1, samples: bool = True) -> Rig:
        rigs.append(Rig(rank, RankLayout(tensor, pipeline), samples=samples))
        return rigs[-1]

    yield made
    for rig in rigs:
        rig.close()


def execute(step: int, num_tokens: int | None = 1) -> ExecuteModel:
    return ExecuteModel(StepId(step), None, num_tokens)


def sample(step: int) -> SampleTokens:
    return SampleTokens(StepId(step))


def test_a_call_that_was_sent_after_a_step_waits_for_it(make: Make) -> None:
    """The line may be faster than the graph; order is what the driver said."""
    rig = make()
    rig.by_line(7, after=1)
    rig.by_graph(1, execute(1))
    assert [rig.next().call, rig.next().call] == [1, 7]


def test_a_step_that_was_sent_after_a_call_waits_for_it(make: Make) -> None:
    """The graph may be faster than the line."""
    rig = make()
    rig.by_graph(2, execute(1), before=1).result(SOON)
    assert rig.roads.statistics().steps_wait == 1
    rig.by_line(1, after=0)
    assert [rig.next().call, rig.next().call] == [1, 2]


def test_a_step_that_comes_while_the_line_is_waited_for_is_heard_at_once(make: Make) -> None:
    """Also right after a frame, when a line without a limit dozes and hears no bell."""
    rig = make()
    rig.by_line(1, after=0)
    assert rig.next().call == 1
    timer = threading.Timer(0.002, lambda: rig.by_graph(2, execute(1), before=1))
    timer.start()
    assert rig.next().call == 2
    timer.join()


def test_a_launch_lets_the_last_stage_go_on_at_once(make: Make) -> None:
    """Its forward pass has no result; the sampling may come while it runs."""
    rig = make()
    assert rig.by_graph(1, execute(1)).result(SOON) == NOTHING
    assert rig.next().value == execute(1)


def test_the_answer_of_the_last_stage_goes_back_by_the_graph(make: Make) -> None:
    """Whoever samples answers there, and the line carries nothing."""
    rig = make()
    outcome = rig.by_graph(5, sample(1))
    assert rig.next().call == 5
    rig.roads.send(Kind.REPLY, 5, StepResult(StepId(1), [3]))
    frame = restore("graph", outcome.result(SOON))  # type: ignore[arg-type] # bytes, of a last stage
    assert (frame.kind, frame.call, frame.value) == (Kind.REPLY, 5, StepResult(StepId(1), [3]))
    rig.roads.send(Kind.REPLY, 9, "of a plain call")
    heard = rig.driver.receive(SOON)
    assert heard is not None
    assert heard.call == 9


@pytest.mark.parametrize(("num_tokens", "samples"), [(0, True), (3, False)])
def test_a_step_that_runs_whole_answers_its_launch(make: Make, num_tokens: int, *, samples: bool) -> None:
    """Without tokens, or without a method that samples, the launch is all there is."""
    rig = make(samples=samples)
    outcome = rig.by_graph(1, execute(1, num_tokens))
    rig.next()
    rig.roads.send(Kind.REPLY, 1, StepResult(StepId(1), None))
    assert restore("graph", outcome.result(SOON)).call == 1  # type: ignore[arg-type]


def test_an_error_goes_by_the_line_and_lets_the_graph_go_on(make: Make) -> None:
    """At once, and not behind older steps."""
    rig = make()
    outcome = rig.by_graph(5, sample(1))
    rig.next()
    rig.roads.send(Kind.FAILURE, 5, ValueError("boom"))
    assert outcome.result(SOON) == NOTHING
    heard = rig.driver.receive(SOON)
    assert heard is not None
    assert (heard.kind, heard.call) == (Kind.FAILURE, 5)


def test_a_sampling_that_waits_for_an_older_one_answers_along_with_it(make: Make) -> None:
    """It must not hold up the graph, which brings the older one; and by the line it would come before it."""
    rig = make()
    early = rig.by_graph(5, sample(2))
    rig.next()
    late = rig.by_graph(6, sample(1))
    assert rig.next().call == 6
    assert early.result(SOON) == NOTHING
    for call, step in ((6, 1), (5, 2)):
        rig.roads.send(Kind.REPLY, call, StepResult(StepId(step), None))
    rig.driver.send(Kind.MESSAGE, 0, sample(9))
    rig.next()
    assert [restore("graph", answer).call for answer in late.result(SOON)] == [6, 5]  # type: ignore[arg-type]


def test_an_answer_that_comes_of_no_sampling_goes_by_the_line(make: Make) -> None:
    """A launch has no outcome that it could go along with."""
    rig = make()
    rig.by_graph(5, sample(2))
    rig.next()
    rig.by_graph(6, execute(3))
    assert rig.next().call == 6
    rig.roads.send(Kind.REPLY, 5, StepResult(StepId(2), None))
    heard = rig.driver.receive(SOON)
    assert heard is not None
    assert heard.call == 5


def test_an_answer_above_the_buffer_is_refused_and_may_be_replaced_by_an_error(make: Make) -> None:
    """Ray would enlarge the channel, and never get it down again."""
    rig = make()
    outcome = rig.by_graph(5, sample(1))
    rig.next()
    with pytest.raises(MessageTooLarge, match="graph_buffer_bytes"):
        rig.roads.send(Kind.REPLY, 5, StepResult(StepId(1), np.zeros(LIMIT, dtype=np.uint8)))
    rig.roads.send(Kind.FAILURE, 5, "too large")
    assert outcome.result(SOON) == NOTHING


def test_a_bitmask_is_for_the_rank_that_samples(make: Make) -> None:
    """The graph gives all ranks the same bytes; the others see what a line would have given them."""
    grammar = GrammarOutput(request_ids=["a"], bitmask=np.ones((1, 4), dtype=np.int32))
    message = SampleTokens(StepId(1), grammar)
    rig, other = make(0, tensor=2), make(1, tensor=2)
    rig.by_graph(1, message)
    other.by_graph(1, message)
    seen = rig.next().value.grammar
    seen.bitmask[0, 0] = 7  # its own memory
    assert other.next().value == SampleTokens(StepId(1))


def test_hidden_states_come_along_with_the_step_and_go_on_from_it(make: Make) -> None:
    """The next stage may begin while this one is still at its end."""
    first, last = make(0, pipeline=2), make(1, pipeline=2)
    outcome = first.by_graph(1, execute(4))
    first.next()
    assert first.roads.link is not None
    first.roads.link.send(4, {"hidden": np.arange(3)})
    last.by_graph(1, execute(4), incoming=outcome.result(SOON))
    last.next()
    assert last.roads.link is not None
    hidden = last.roads.link.receive(4, None)
    hidden["hidden"][0] = 9  # it is ours
    assert hidden["hidden"].tolist() == [9, 1, 2]


def test_a_stage_that_hands_nothing_on_lets_the_next_one_go_on_and_it_says_so(make: Make) -> None:
    """A worker class that raises, or has nothing to say, holds nobody up."""
    first, last = make(0, pipeline=2), make(1, pipeline=2)
    outcome = first.by_graph(1, execute(4))
    first.next()
    first.by_graph(2, sample(4))
    assert first.next().call == 2
    last.by_graph(1, execute(4), incoming=outcome.result(SOON))
    last.next()
    assert last.roads.link is not None
    with pytest.raises(PeerLost, match="it handed nothing on"):
        last.roads.link.receive(4, None)


def test_a_failure_of_the_stage_before_is_told_in_its_place(make: Make) -> None:
    """As on the other links: it failed at this step."""
    first, last = make(0, pipeline=2), make(1, pipeline=2)
    outcome = first.by_graph(1, execute(4))
    first.next()
    assert first.roads.link is not None
    first.roads.link.send_failure(4, None)
    last.by_graph(1, execute(4), incoming=outcome.result(SOON))
    last.next()
    assert last.roads.link is not None
    with pytest.raises(PeerLost, match="it failed at this step"):
        last.roads.link.receive(4, None)


def test_hidden_states_of_another_step_are_refused(make: Make) -> None:
    """They never pass for those of this one."""
    last = make(1, pipeline=2)
    tensor: Any = _Tensor()
    last.by_graph(1, execute(5), incoming=(4, tensor))
    last.next()
    assert last.roads.link is not None
    with pytest.raises(ProtocolError, match="at step 5, and rank 0 sent step 4"):
        last.roads.link.receive(5, None)


class _Tensor:
    class device:  # noqa: N801 - an attribute
        type = "cpu"


def test_a_message_that_cannot_be_read_counts_and_holds_nothing_up(make: Make) -> None:
    """Its sender is told by the line; what comes after it goes its way."""
    rig = make()
    data = bytearray(step_message(1, execute(1), [0], LIMIT))
    data[-1] ^= 0xFF
    assert rig.take(bytes(data)).result(SOON) == NOTHING
    frame = rig.next()
    assert frame.error is not None
    rig.by_line(2, after=1)
    assert rig.next().call == 2


def test_a_step_message_on_the_line_is_let_through_and_not_counted(make: Make) -> None:
    """So the driver makes up for one that a rank could not read."""
    rig = make()
    rig.driver.send(Kind.MESSAGE, 0, sample(1))
    assert rig.next().value == sample(1)
    assert rig.roads.statistics()[:2] == (0, 0)


def test_closing_lets_every_thread_of_the_graph_go(make: Make) -> None:
    """Now and later; else the process could not end."""
    rig = make()
    waiting = [rig.by_graph(1, sample(1)), rig.by_graph(2, sample(2))]
    rig.next()
    rig.roads.close()
    waiting.append(rig.by_graph(3, sample(3)))
    assert [each.result(SOON) for each in waiting] == [NOTHING] * 3


def test_a_message_that_only_wakes_the_graph_up_reaches_nobody(make: Make) -> None:
    """It is for Ray's own first time."""
    rig = make()
    assert rig.take(WAKE).result(SOON) == NOTHING
    assert not rig.state.has_queued()


def test_what_waits_shows_in_the_pulse(make: Make) -> None:
    """Whichever road it came by."""
    rig = make()
    rig.by_graph(1, execute(1)).result(SOON)
    assert rig.state.pong().queued == 1
    assert "0 steps" in repr(rig.roads)


def test_the_end_of_the_line_is_the_end(make: Make) -> None:
    """The driver is gone: whatever the graph may still bring."""
    rig = make()
    rig.driver.close()
    with pytest.raises(ChannelClosed):
        rig.next()
