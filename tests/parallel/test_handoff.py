"""Hidden states along a graph: passages and their link."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from aexec.errors import MessageTooLarge, PeerLost, ProtocolError
from aexec.parallel.handoff import NOTHING, GraphLink, Passage
from aexec.parallel.layout import RankLayout
from aexec.parallel.streams import arrived, computed
from aexec.worker.roads import WAKE

LAYOUT = RankLayout(tensor=1, pipeline=2)


def pair() -> tuple[GraphLink, GraphLink]:
    """The links of both stages."""
    return GraphLink(LAYOUT, 0, 1 << 16), GraphLink(LAYOUT, 1, 1 << 16)


def handed(first: GraphLink, last: GraphLink, step: int, hidden: Any) -> Any:
    """What the last stage gets of what the first one sends."""
    passage = Passage()
    first.begin(passage)
    first.send(step, hidden)
    last.begin(Passage(passage.wait()))
    return last.receive(step, None)


@pytest.mark.parametrize("hidden", [17, {"a": [1.5]}, "x" * 20000])
def test_any_value_is_handed_on(hidden: object) -> None:
    """The dummy's words, and whatever a worker class of yours calls hidden states."""
    first, last = pair()
    assert handed(first, last, 3, hidden) == hidden
    assert (first.statistics().sent, last.statistics().received) == (1, 1)


def test_a_tensor_is_handed_on_as_it_is() -> None:
    """The graph knows best how to carry it."""
    torch = pytest.importorskip("torch")
    first, last = pair()
    tensor = torch.arange(6.0).reshape(1, 2, 3)
    assert handed(first, last, 3, tensor) is tensor


def test_a_tensor_above_the_buffer_is_refused_unless_it_goes_by_the_device() -> None:
    """Through host memory it would not fit."""
    torch = pytest.importorskip("torch")
    first, last = pair()
    tensor = torch.zeros(1, 4, 5000)
    with pytest.raises(MessageTooLarge, match=r"the hidden states of step 3: 84,096 bytes.*graph_buffer_bytes"):
        handed(first, last, 3, tensor)
    first.tensor_limit = None
    assert handed(first, last, 3, tensor) is tensor


def test_hidden_states_are_taken_once() -> None:
    """Nobody keeps them alive but the step itself."""
    first, last = pair()
    handed(first, last, 3, 17)
    with pytest.raises(PeerLost, match="handed nothing on"):
        last.receive(3, None)


def test_a_step_that_came_by_no_graph_is_refused() -> None:
    """A worker that uses the link outside of a step."""
    first, _ = pair()
    with pytest.raises(ProtocolError, match="rank 0 wants to hand on step 3, which came by no graph"):
        first.send(3, 1)
    first.begin(Passage())
    first.open()
    first.close()
    with pytest.raises(ProtocolError):
        first.send_failure(3, None)
    assert "GraphLink of rank 0: None to 1, 0 sent" in repr(first)


def test_a_passage_gives_what_was_given_first() -> None:
    """What follows is of no use to anybody."""
    passage = Passage()
    heard: list[object] = []
    thread = threading.Thread(target=lambda: heard.append(passage.wait()))
    thread.start()
    passage.give(b"first")
    passage.give(b"second")
    thread.join(10)
    assert (heard, passage.is_over, repr(passage)) == ([b"first"], True, "<Passage: through>")


def test_what_is_on_a_cpu_is_there() -> None:
    """There is no stream to wait for."""
    tensor = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    assert computed(tensor) is None
    arrived(tensor)


def test_on_a_device_the_thread_that_goes_on_follows_the_one_that_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream waits for the work, and the memory for both streams; what arrives is waited for. No GPU is needed to see it."""
    log: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_event(self, event: Any) -> None:
            log.append(f"{self.name} waits for {event.name}")

        def synchronize(self) -> None:
            log.append(f"{self.name} is waited for")

    class Event:
        name = "the event"

        def record(self, stream: Stream) -> None:
            log.append(f"{stream.name} records")

    def current_stream(_device: object) -> Stream:
        return Stream(threading.current_thread().name)

    cuda = SimpleNamespace(Event=Event, current_stream=current_stream)
    monkeypatch.setitem(__import__("sys").modules, "torch", SimpleNamespace(cuda=cuda))
    tensor: Any = SimpleNamespace(
        device=SimpleNamespace(type="cuda"), record_stream=lambda stream: log.append(f"{stream.name} uses it")
    )
    passage = Passage()
    passage.give((3, tensor), computed(tensor))
    graph = threading.Thread(target=passage.wait, name="graph")
    graph.start()
    graph.join(10)
    arrived(tensor)
    assert log == ["MainThread records", "graph waits for the event", "graph uses it", "MainThread is waited for"]


def test_nothing_is_falsy() -> None:
    """So that whoever has an outcome need not look at what it is; no empty bytes: Ray does not carry them to other nodes."""
    assert not NOTHING
    assert not isinstance(NOTHING, bytes)
    assert len(WAKE) > 0
