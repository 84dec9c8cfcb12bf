from __future__ import annotations

from dataclasses import dataclass

import pytest

from aexec.actor.envelope import Envelope, Origin, Stage, here, seal, trace_context
from aexec.actor.table import Handler
from aexec.messages.base import Message


class Work(Message[None], frozen=True):
    pass


@dataclass
class Hop:
    name: str
    generation: int = 3

    @property
    def address(self) -> str:
        return f"system/{self.name}"


class Reply:
    def done(self) -> bool:
        return False


HANDLER = Handler(Work, "work", lambda _, __: None, False, "normal", 1, shield=False)


def envelope(origin, *, ask=True) -> Envelope:
    return seal(7, Work(), HANDLER, Hop("b"), 1.0, origin, Reply() if ask else None)


def test_an_ask_inherits_from_where_it_is_sent():
    """Sender, chain, deadline and trace come from the handler that asks; generation from the target."""
    inner = envelope(Origin(Hop("a"), ("system/a",), 5.0, "trace"))
    assert (inner.sender.name, inner.chain, inner.deadline, inner.traceparent) == ("a", ("system/a",), 5.0, "trace")
    assert (inner.id, inner.generation, inner.sent_at) == (7, 3, 1.0)


def test_a_tell_starts_a_chain_of_its_own():
    """Nobody waits for a tell, so that neither chain nor deadline go with it; sender and trace do."""
    told = envelope(Origin(Hop("a"), ("system/a",), 5.0, "trace"), ask=False)
    assert (told.sender.name, told.chain, told.deadline, told.traceparent) == ("a", (), None, "trace")


def test_an_actor_waits_while_its_handler_runs_and_no_longer():
    """Its address is in the chain of nested asks until the handler has returned."""
    asked = envelope(Origin(None, ("system/a",)))
    asked.stage = Stage.RUNNING
    assert asked.callers == ("system/a", "system/b")
    asked.stage = Stage.DEFERRED
    assert asked.callers == ("system/a",)
    asked.finish()
    assert asked.callers == ()


def test_an_envelope_that_is_over_holds_on_to_nothing():
    """Message, reply and callbacks are let go."""
    asked = envelope(None)
    assert not asked.is_over()
    asked.finish()
    assert (asked.message, asked.reply, asked.on_gone, asked.deadline) == (None, None, None, None)
    assert asked.is_over()


def test_an_envelope_prints_what_it_is():
    """Its repr has id, verb, message, actor and stage."""
    assert repr(envelope(None)) == "<Envelope 7: ask Work to b, is in the mailbox>"
    assert repr(envelope(None, ask=False)) == "<Envelope 7: tell Work to b, is in the mailbox>"


def test_an_envelope_has_no_dict():
    """It is slotted, since one is made per message."""
    with pytest.raises(AttributeError):
        envelope(None).other = 1


def test_a_trace_context_ends_with_its_block():
    """It keeps deadline and chain of where it is opened, and is undone on leaving."""
    token = here.set(Origin(None, ("system/a",), 5.0))
    with trace_context("trace"):
        origin = here.get()
        assert (origin.callers, origin.deadline, origin.traceparent) == (("system/a",), 5.0, "trace")
    assert here.get().traceparent is None
    here.reset(token)
    with trace_context("other"):
        assert here.get().traceparent == "other"
    assert here.get() is None
