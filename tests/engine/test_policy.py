"""The more important first; among equals first come, first served."""

from __future__ import annotations

import pickle

import pytest

from aexec.engine.policy import StepPlan, WaitingQueue, admit, decodes_first, least
from aexec.engine.request import Request, RequestStatus
from aexec.errors import QueueFull
from aexec.messages.request import SamplingParams


def make(name, num_tokens=4, num_computed=0, **facts):
    request = Request(name, [1] * num_tokens, num_tokens, SamplingParams(), frozenset(), 99, **facts)
    request.num_computed_tokens = num_computed
    return request


def names(requests):
    return [request.request_id for request in requests]


def test_requests_leave_the_queue_by_priority_and_then_in_order_of_arrival():
    """A preempted request comes back to its own place, before those that came later."""
    queue = WaitingQueue(limit=8)
    first, second = make("first", arrival=1), make("second", arrival=2)
    back, urgent, low = make("back", arrival=0), make("urgent", arrival=9, priority=-1), make("low", priority=1)
    for request in (low, first, second, urgent, back):
        queue.push(request)
    assert names(queue) == ["urgent", "back", "first", "second", "low"]
    queue.remove(first)
    queue.remove(urgent)
    assert queue.head() is back
    assert repr(queue) == "<WaitingQueue: 3/8 waiting>"


def test_a_request_that_is_not_ready_holds_up_nobody():
    """It counts, is no head, and comes to its place once it is ready."""
    queue = WaitingQueue(limit=8)
    leader = make("leader", arrival=0)
    sample, constrained = make("sample", arrival=1, leader=leader), make("constrained", arrival=2)
    constrained.status = RequestStatus.WAITING_FOR_GRAMMAR
    for request in (sample, constrained, make("other", arrival=3)):
        queue.push(request)
    assert (queue.head().request_id, len(queue)) == ("other", 3)
    assert repr(queue) == "<WaitingQueue: 3/8 waiting, 2 of them not ready>"
    queue.settle(sample)
    assert queue.head().request_id == "other"
    sample.leader = None
    queue.settle(sample)
    queue.settle(sample)
    queue.remove(constrained)
    assert names(queue) == ["sample", "other"]


def test_a_full_queue_turns_away_new_requests_and_takes_preempted_ones():
    """The bound is for those who come; who was admitted once is not lost."""
    queue = WaitingQueue(limit=2)
    queue.push(make("a"))
    queue.check_room(make("b"))
    with pytest.raises(QueueFull, match="request b was turned away, as 2 requests are waiting") as caught:
        queue.check_room(make("b"), 2)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    queue.push(make("c"))
    queue.push(make("d"))
    assert len(queue) == 3


def test_running_requests_stay_in_order_of_rank():
    """Whoever is admitted late and is important does not give way first."""
    running = {}
    for request in (make("a", arrival=0), make("low", arrival=1, priority=5), make("b", arrival=2)):
        admit(running, request)
    assert names(running.values()) == ["a", "b", "low"]
    assert least(running).request_id == "low"


def test_decodes_come_before_prefills():
    """Both keep their order."""
    running = {name: make(name, 4, computed) for name, computed in {"a": 0, "b": 3, "c": 2, "d": 3}.items()}
    assert [request.request_id for request in decodes_first(running)] == ["b", "d", "a", "c"]


def test_a_dropped_request_gives_its_tokens_back():
    """The budget is as before it was added."""
    plan = StepPlan(10)
    plan.add(make("a"), 4)
    plan.drop(make("a"))
    assert (plan.budget, plan.num_scheduled_tokens, plan.preempted) == (10, {}, True)
