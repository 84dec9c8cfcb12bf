from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from aexec.actor.envelope import Envelope, Stage, seal
from aexec.actor.lifecycle import Exit
from aexec.actor.mailbox import Mailbox
from aexec.actor.table import Handler
from aexec.messages.base import Message


class Work(Message[None], frozen=True):
    pass


@dataclass
class Hop:
    name: str = "worker-3"
    address: str = "test/worker-3"
    generation: int = 1


def handler(lane="normal", concurrent=1) -> Handler:
    return Handler(Work, "work", lambda _, __: None, concurrent > 1, lane, concurrent, shield=False)


NORMAL, URGENT, PAIR = handler(), handler("urgent"), handler(concurrent=2)
ids = itertools.count()


def tell(handler: Handler = NORMAL) -> Envelope:
    return seal(next(ids), Work(), handler, Hop(), 0.0, None, None)


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox("worker-3", 2)


def test_a_lane_is_first_in_first_out(mailbox):
    """Messages come out in the order in which they went in."""
    first, second = tell(), tell()
    assert mailbox.put(first)
    assert mailbox.put(second)
    assert [mailbox.pop(), mailbox.pop(), mailbox.pop()] == [first, second, None]


def test_a_full_lane_takes_no_more(mailbox):
    """The bound holds, and each lane has its own."""
    assert [mailbox.put(tell()) for _ in range(3)] == [True, True, False]
    assert mailbox.put(tell(URGENT))


def test_urgent_goes_before_normal(mailbox):
    """An urgent message is taken first, unless only normal ones are wanted."""
    normal, urgent = tell(), tell(URGENT)
    mailbox.put(normal)
    mailbox.put(urgent)
    assert mailbox.pop() is urgent
    mailbox.put(urgent)
    assert mailbox.pop(normal_only=True) is normal
    assert mailbox.pop_urgent() is urgent


def test_who_waits_comes_in_when_there_is_room(mailbox):
    """Waiters are let in by turns, and nobody passes them."""
    first, second, third, late = tell(), tell(), tell(), tell()
    mailbox.put(first)
    mailbox.put(second)
    mailbox.wait(third)
    assert third.stage is Stage.WAITING
    assert mailbox.pop() is first
    assert third.stage is Stage.QUEUED
    assert not mailbox.put(late)
    assert mailbox.pop() is second
    assert mailbox.pop() is third


def test_a_waiter_keeps_others_from_passing(mailbox):
    """With somebody waiting, a lane has no room for those who come later."""
    mailbox.put(tell())
    mailbox.put(tell())
    waiter = tell()
    mailbox.wait(waiter)
    mailbox.discard(waiter)
    mailbox.pop()
    assert mailbox.put(tell())


def test_concurrent_messages_are_held_back_without_a_slot(mailbox):
    """Messages beyond concurrent= are held back, still take up room, and let others pass."""
    mailbox = Mailbox("worker-3", 3)
    running = [tell(PAIR), tell(PAIR)]
    held, other = tell(PAIR), tell()
    for envelope in (*running, held):
        mailbox.put(envelope)
    assert [mailbox.pop(), mailbox.pop()] == running
    mailbox.put(other)
    assert mailbox.pop() is other
    assert held.stage is Stage.HELD
    assert mailbox.statistics().queued == 1
    assert mailbox.release(PAIR) is held
    assert mailbox.release(PAIR) is None
    assert mailbox.statistics().queued == 0


def test_held_messages_count_against_the_bound(mailbox):
    """What is held back for a slot leaves that much less room."""
    for _ in range(2):
        mailbox.put(tell(PAIR))
        mailbox.pop()
    mailbox.put(tell(PAIR))
    mailbox.put(tell(PAIR))
    assert mailbox.pop() is None
    assert not mailbox.put(tell())


@pytest.mark.parametrize("where", ["waiting", "queued", "held"])
def test_a_message_can_be_taken_out_wherever_it_is(mailbox, where):
    """Discarding makes room, wherever the message was."""
    envelope = tell(PAIR)
    if where == "held":
        for _ in range(2):
            mailbox.put(tell(PAIR))
            mailbox.pop()
    if where == "waiting":
        mailbox.put(tell())
        mailbox.put(tell())
        mailbox.wait(envelope)
    else:
        mailbox.put(envelope)
    if where == "held":
        assert mailbox.pop() is None
    mailbox.discard(envelope)
    now = mailbox.statistics()
    assert (now.queued, now.waiting) == ((2, 0) if where == "waiting" else (0, 0))


def test_clearing_takes_out_all_messages_and_leaves_signals(mailbox):
    """A closed mailbox gives back every message, waiting and held ones too; its signals stay."""
    envelopes = [tell(URGENT), tell(), tell()]
    for envelope in envelopes:
        mailbox.put(envelope)
    waiter = tell()
    mailbox.wait(waiter)
    mailbox.signal(Exit("stopped", "test"))
    assert set(mailbox.clear()) == {*envelopes, waiter}
    now = mailbox.statistics()
    assert (now.queued, now.urgent, now.system, now.waiting) == (0, 0, 1, 0)


def test_a_mailbox_prints_what_is_in_it():
    """Its repr names the actor, the fill of its lanes, and who waits."""
    mailbox = Mailbox("worker-3", 64)
    assert repr(mailbox) == "<Mailbox worker-3: 0/64 queued>"
    mailbox.put(tell())
    mailbox.put(tell())
    mailbox.signal(Exit("stopped", "test"))
    assert mailbox.describe("running") == "worker-3: 2/64 queued, 1 system, running"
