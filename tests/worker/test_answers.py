from __future__ import annotations

import threading

import pytest

from aexec.errors import ChannelClosed, ConfigError, MessageNotPortable
from aexec.transport import Kind
from aexec.worker.answers import Answers


class Line:
    """Takes what pickles, as far as a test says."""

    def __init__(self, *refusals):
        self.sent, self.refusals = [], list(refusals)

    def send(self, kind, call, value=None):
        if self.refusals and (refusal := self.refusals.pop(0)) is not None:
            raise refusal
        self.sent.append((kind, call, value))


def test_a_value_is_a_reply():
    """Under the call's id."""
    line = Line()
    Answers(line, 2).reply(7, "echo", "value")
    assert line.sent == [(Kind.REPLY, 7, "value")]


def test_a_value_that_cannot_travel_is_its_callers_error():
    """G51: the channel lives on."""
    line = Line(MessageNotPortable("lock", "", "lock", "TypeError: no"))
    Answers(line, 2).reply(7, "lock", threading.Lock())
    ((kind, call, error),) = line.sent
    assert (kind, call) == (Kind.FAILURE, 7)
    assert "raised by lock on rank 2" in error.__notes__


def test_a_failure_that_cannot_travel_is_replaced_by_why():
    """Each call has an answer."""
    line = Line(ValueError("no room"))
    Answers(line, 2).fail(7, "echo", ConfigError("so large"))
    ((kind, _, failure),) = line.sent
    assert (kind, failure.rank, failure.method, failure.text) == (Kind.FAILURE, 2, "echo", "no room")


def test_the_drivers_end_is_not_an_answer():
    """It ends the process."""
    for attempt in (lambda answers: answers.reply(1, "a", 1), lambda answers: answers.fail(1, "a", ValueError())):
        with pytest.raises(ChannelClosed):
            attempt(Answers(Line(ChannelClosed("work", "the peer is gone")), 0))
