"""The queue of steps in flight: who is sampled next, whose result counts now, how full it is."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aexec.engine.inflight import FlightState, InFlight
from aexec.errors import ConfigError, ProtocolError
from aexec.messages.batch import GrammarOutput, SchedulerOutput

BATCH = SchedulerOutput()
MASK = GrammarOutput(request_ids=["a"], bitmask=np.zeros((1, 1), dtype=np.int32))


class Clock:
    """Seconds that a test sets."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def queue(depth=4, *, launched=0, constrained=()):
    """Steps 1 to ``launched``, the forward pass of each queued."""
    flights = InFlight(depth, Clock())
    for step in range(1, launched + 1):
        flights.take_off(step, BATCH, frozenset(constrained) if step in (1, 2) and constrained else frozenset())
        flights.launched(step)
    return flights


def steps(flights):
    return [flight.step for flight in flights]


def test_a_step_is_sampled_once_its_forward_pass_is_queued():
    """Before that the ranks know no such step; and it is asked for once."""
    flights = queue()
    flights.take_off(1, BATCH)
    assert flights.due_samples() == []
    flights.launched(1)
    assert steps(flights.due_samples()) == [1]
    assert flights.due_samples() == []


def test_steps_are_sampled_in_order():
    """A step that is ready waits for the one before it."""
    flights = queue()
    for step in (1, 2):
        flights.take_off(step, BATCH)
    flights.launched(2)
    assert flights.due_samples() == []
    flights.launched(1)
    assert steps(flights.due_samples()) == [1, 2]


def test_a_step_with_a_grammar_waits_for_its_bitmask_and_those_behind_wait_with_it():
    """The ranks sample in order; its forward pass runs meanwhile."""
    flights = queue()
    for step, constrained in ((1, ()), (2, ("a",)), (3, ())):
        flights.take_off(step, BATCH, frozenset(constrained))
        flights.launched(step)
    assert steps(flights.due_samples()) == [1]
    assert not flights.all_sampled
    flights.masked(2, MASK)
    first, second = flights.due_samples()
    assert (first.step, first.mask, second.step, second.mask) == (2, MASK, 3, None)
    assert flights.all_sampled


def test_a_bitmask_is_made_once_the_tokens_before_it_are_known():
    """A request that an earlier step samples under its grammar has no next mask yet; others have."""
    flights = queue()
    for step, constrained in ((1, "a"), (2, "ab"), (3, "c")):
        flights.take_off(step, BATCH, frozenset(constrained))
    assert steps(flights.due_masks()) == [1, 3]
    assert flights.due_masks() == []
    flights.land(1)
    assert steps(flights.due_masks()) == [2]


def test_a_step_whose_bitmask_cannot_be_made_is_sampled_without():
    """Who asked for it is told; the other requests of the step go on."""
    flights = queue()
    flights.take_off(1, BATCH, frozenset("a"))
    flights.launched(1)
    assert flights.unmask(1) == {"a"}
    assert [flight.mask for flight in flights.due_samples()] == [None]
    assert flights.unmask(9) == frozenset()


@settings(max_examples=60, deadline=None)
@given(order=st.permutations(range(1, 7)), failed=st.sets(st.integers(1, 6)))
def test_results_are_taken_in_step_order_whatever_order_they_come_in(order, failed):
    """Each is returned once, in order, as soon as all before it are there."""
    flights = queue(6, launched=6)
    taken = []
    for place, step in enumerate(order):
        error = ValueError() if step in failed else None
        taken += flights.land(step, f"output {step}", error)
        there = set(order[: place + 1])
        assert steps(taken) == list(range(1, next(number for number in range(1, 8) if number not in there)))
    assert [(flight.output, flight.error is not None) for flight in taken] == [
        (f"output {step}", step in failed) for step in range(1, 7)
    ]
    assert flights.statistics()[3:5] == (6, len(failed))


def test_what_is_said_of_forgotten_steps_changes_nothing():
    """A worker group that is gone may still be heard of."""
    flights = queue(4, launched=2)
    assert steps(flights.clear()) == [1, 2]
    flights.launched(1)
    flights.masked(1, MASK)
    assert flights.land(1, "late") == []
    assert (len(flights), flights.knows(1), flights.num_free) == (0, False, 4)


def test_a_step_takes_off_into_a_free_place_with_a_greater_id():
    """Anything else is a fault of the driver's."""
    flights = queue(2, launched=1)
    with pytest.raises(ProtocolError, match="step 1 cannot take off"):
        flights.take_off(1, BATCH)
    flights.take_off(2, BATCH)
    with pytest.raises(ProtocolError, match="step 3 cannot take off: <InFlight: 2/2 steps: 1 launched, 2 launching>"):
        flights.take_off(3, BATCH)


def test_a_pipeline_has_room_for_a_step_at_least():
    """The error says what was given."""
    with pytest.raises(ConfigError, match="the depth of the pipeline is 0"):
        InFlight(0, Clock())


def test_the_bubble_is_the_share_of_slots_that_were_empty_while_there_was_work():
    """Slots are counted by time; while there is no work none is."""
    clock = Clock()
    flights = InFlight(2, clock)
    clock.now = 100.0
    flights.take_off(1, BATCH)  # one slot of two is empty for 3 s
    clock.now = 103.0
    flights.take_off(2, BATCH)  # none for 5 s
    clock.now = 108.0
    flights.land(1)
    flights.land(2)  # both for 1 s
    clock.now = 109.0
    flights.rest()
    clock.now = 500.0
    statistics = flights.statistics()
    assert (statistics.busy_seconds, statistics.bubble) == (9.0, (3 + 2) / 18)
    assert (statistics.depth, statistics.num_in_flight, statistics.peak_in_flight) == (2, 0, 2)


def test_an_engine_that_never_worked_has_no_bubble():
    """There is nothing to divide by."""
    flights = queue()
    flights.rest()
    assert flights.statistics() == (4, 0, 0, 0, 0, 0.0, 0.0)


def test_a_random_driver_never_gets_stuck():
    """Whatever order answers come in: every step is sampled once, in order, and lands."""
    for seed in range(50):
        chance = random.Random(seed)
        flights, launched, sampled, landed, step = InFlight(3, Clock()), [], [], [], 0
        while len(landed) < 20:
            if flights.num_free and step < 20 and chance.random() < 0.7:
                step += 1
                flights.take_off(step, BATCH, frozenset("a") if chance.random() < 0.3 else frozenset())
                launched.append(step)
            if launched and chance.random() < 0.5:
                flights.launched(launched.pop(chance.randrange(len(launched))))
            for flight in flights.due_masks():
                flights.masked(flight.step, MASK)
            sampled += steps(flights.due_samples())
            waiting = [flight.step for flight in flights.flights if flight.state is FlightState.SAMPLING]
            if waiting and chance.random() < 0.5:
                landed += steps(flights.land(chance.choice(waiting)))
        assert sampled == landed == list(range(1, 21))


def test_outcomes_may_be_taken_one_at_a_time():
    """A step that has landed keeps its slot until then, so that each decision knows as much on every rank."""
    flights = queue(3, launched=3)
    flights.due_samples()
    assert flights.mark_landed(2)
    assert not flights.has_landed
    assert flights.mark_landed(1)
    assert not flights.mark_landed(9)
    assert (flights.has_landed, flights.num_free) == (True, 0)
    assert [flights.take_landed().step, flights.num_free] == [1, 1]
    assert [flights.take_landed().step, flights.has_landed] == [2, False]


def test_a_step_may_follow_once_all_before_it_are_sampled():
    """Whatever has landed by then."""
    flights = queue(3, launched=2)
    assert flights.may_follow(1)
    assert not flights.may_follow(2)
    flights.due_samples()
    assert flights.may_follow(3)
