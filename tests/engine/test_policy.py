"""First come, first served."""

from __future__ import annotations

import pickle

import pytest

from aexec.engine.policy import FcfsQueue, StepPlan, decodes_first, latest
from aexec.engine.request import Request
from aexec.errors import QueueFull
from aexec.messages.request import SamplingParams


def make(name, num_tokens=4, num_computed=0):
    request = Request(name, [1] * num_tokens, num_tokens, SamplingParams(), frozenset(), 99)
    request.num_computed_tokens = num_computed
    return request


def test_requests_leave_the_queue_in_order_of_arrival():
    """The head is the first to have come; a preempted request goes before it."""
    queue = FcfsQueue(limit=8)
    first, second, back = make("first"), make("second"), make("back")
    queue.push(first)
    queue.push(second)
    queue.push_front(back)
    assert [request.request_id for request in queue] == ["back", "first", "second"]
    queue.remove(first)
    assert queue.head() is back
    assert repr(queue) == "<FcfsQueue: 2/8 waiting>"


def test_a_full_queue_turns_away_new_requests_and_takes_preempted_ones():
    """The bound is for those who come; who was admitted once is not lost."""
    queue = FcfsQueue(limit=1)
    queue.push(make("a"))
    with pytest.raises(QueueFull, match="request b was turned away, as 1 requests are waiting") as caught:
        queue.push(make("b"))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    queue.push_front(make("c"))
    assert len(queue) == 2


def test_decodes_come_before_prefills():
    """Both keep their order of arrival."""
    running = {name: make(name, 4, computed) for name, computed in {"a": 0, "b": 3, "c": 2, "d": 3}.items()}
    assert [request.request_id for request in decodes_first(running)] == ["b", "d", "a", "c"]
    assert latest(running).request_id == "d"


def test_a_dropped_request_gives_its_tokens_back():
    """The budget is as before it was added."""
    plan = StepPlan(10)
    plan.add(make("a"), 4, [1])
    plan.drop(make("a"))
    assert (plan.budget, plan.num_scheduled_tokens, plan.preempted) == (10, {}, True)
