from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aexec.errors import ActorStopped, AexecError, MailboxFull, PeerLost, ProtocolError, RemoteError
from aexec.executor import collective
from aexec.executor.collective import CAUSE_WINDOW, DEATH_WINDOW, PEER_WINDOW, Call, CallBook, Lane


class Outcome:
    """A waiter that may be ended once."""

    def __init__(self):
        self.ends = []

    def resolve(self, value):
        self.ends.append(value)

    def fail(self, error):
        self.ends.append(error)

    @property
    def end(self):
        (end,) = self.ends
        return end


def in_order(answers):
    return [answers[rank] for rank in sorted(answers)]


class Watched(Call, eq=False):
    """A call whose outcome can be looked at."""

    outcome: Any = None


def make(number, lane=Lane.SYNC, ranks=(0, 1), *, now=0.0, timeout=None, slow_every=10.0):
    call = Watched(
        number,
        f"call_{number}",
        lane,
        ranks,
        None,
        Outcome(),
        in_order,
        now,
        set(ranks),
        timeout,
        math.inf if timeout is None else now + timeout,
        slow_every,
        now + slow_every,
    )
    call.outcome = call.waiter
    return call


@pytest.fixture
def book() -> CallBook:
    return CallBook(2)


def test_a_call_ends_with_all_answers_in_rank_order(book):
    """In whatever order they came."""
    call = make(1)
    assert book.accept(call) == [call]
    book.answer(1, 1, "b", now=0.0)
    assert not call.outcome.ends
    book.answer(1, 0, "a", now=0.0)
    assert call.outcome.end == ["a", "b"]
    assert not book.open


def test_a_rank_may_have_answered_before_the_call_is_sent(book):
    """Of a replicated executor: its own program has made the call earlier; it is not busy with it."""
    ahead, call, behind = make(1), make(2), make(3)
    assert [book.accept(each) for each in (ahead, call, behind)] == [[ahead], [], []]
    book.answer(2, 0, "early", now=0.0)
    book.answer(1, 0, "a", now=0.0)
    assert book.answer(1, 1, "b", now=0.0) == [call]
    assert book.answer(2, 1, "late", now=0.0) == [behind]
    assert call.outcome.end == ["early", "late"]


def fail_what_is_due(book, now):
    for call in book.failing(now):
        call.fail_for_cause(now)


def test_the_first_error_ends_the_call_soon(book):
    """G06: rank 1's error is seen although rank 0 never answers."""
    call = make(1)
    book.accept(call)
    error = ProtocolError("broken")
    book.error(1, 1, error, now=0.5)
    assert book.next_wake() == 0.5 + CAUSE_WINDOW
    fail_what_is_due(book, 0.5)
    assert not call.outcome.ends
    fail_what_is_due(book, 0.6)
    assert call.outcome.end is error
    assert error.__notes__ == ["rank 0: no answer after 0.6 s"]


def test_where_all_have_answered_a_lost_peer_waits_a_moment_for_the_death_that_explains_it(book):
    """What its peer notices first may reach us before the event of the death itself."""
    for number in (1, 2):
        call = make(number, Lane.STEP, timeout=0.05)
        book.accept(call)
        book.answer(number, 0, "a", now=1.0)
        book.error(number, 1, PeerLost(1, 0, "receive the hidden states"), now=1.0)
        assert not call.outcome.ends
        assert book.next_wake() == 1.0 + DEATH_WINDOW
        assert book.due(2.0) == []
        if number == 1:
            book.fail_all(lambda _: ProtocolError("rank 0 died"))
            assert str(call.outcome.end) == "rank 0 died"
        else:
            fail_what_is_due(book, 1.0 + DEATH_WINDOW)
            assert isinstance(call.outcome.end, PeerLost)
            assert call.outcome.end.__notes__ == ["rank 0: answered"]
        assert not book.open


def test_a_lost_peer_that_nobody_waits_to_hear_of_is_forgotten(book):
    """Its asker has gone, or had its end elsewhere."""
    abandoned, ended = make(1, Lane.STEP), make(2, Lane.STEP)
    for call in (abandoned, ended):
        book.accept(call)
        for rank in (0, 1):
            book.error(call.id, rank, PeerLost(rank, 1 - rank, "gather the parts"), now=1.0)
    book.abandon(abandoned)
    assert list(book.open) == [2]
    ended.fail(ProtocolError("its launch was refused"))
    assert book.failing(1.0 + DEATH_WINDOW) == []
    assert not book.open


def test_errors_that_follow_are_notes_of_the_first():
    """G32: the root cause is the earliest; what it brings about elsewhere is told below it."""
    book = CallBook(3)
    call = make(1, ranks=(0, 1, 2))
    book.accept(call)
    cause = ProtocolError("bad config")
    book.error(1, 2, cause, now=0.5)
    book.error(1, 0, ProtocolError("connection reset\nby peer"), now=0.51)
    fail_what_is_due(book, 0.6)
    assert call.outcome.end is cause
    assert cause.__notes__ == [
        "rank 0: raised as well: ProtocolError: connection reset",
        "rank 1: no answer after 0.6 s",
    ]


def test_the_same_error_of_many_ranks_is_one_note():
    """Whatever rank it names."""
    book = CallBook(4)
    call = make(1, ranks=(0, 1, 2, 3))
    book.accept(call)
    for rank in (3, 0, 2):
        error = RemoteError()
        error.rank, error.method, error.type_name, error.text = rank, "load", "KeyError", "bad config"
        book.error(1, rank, error, now=0.5)
    fail_what_is_due(book, 0.6)
    assert call.outcome.end.__notes__ == ["ranks 0, 2: raised the same", "rank 1: no answer after 0.6 s"]


def test_a_call_that_all_ranks_have_failed_waits_for_nobody(book):
    """No window where nobody is missing."""
    call = make(1)
    book.accept(call)
    cause = ProtocolError("bad config")
    book.error(1, 1, cause, now=0.5)
    book.error(1, 0, ProtocolError("follows"), now=0.51)
    assert call.outcome.end is cause


def test_a_lost_peer_is_the_cause_only_if_nothing_else_is_heard(book):
    """The peer's own error comes later and says more; a longer window is left for it."""
    call = make(1)
    book.accept(call)
    book.error(1, 0, PeerLost(0, 1, "receive the hidden states", "connection reset"), now=0.5)
    fail_what_is_due(book, 0.5 + CAUSE_WINDOW)
    assert not call.outcome.ends
    cause = ProtocolError("bad config")
    book.error(1, 1, cause, now=0.7)
    assert call.outcome.end is cause
    alone = make(2)
    book.accept(alone)
    book.error(2, 0, PeerLost(0, 1, "receive the hidden states"), now=1.0)
    fail_what_is_due(book, 1.0 + PEER_WINDOW)
    assert isinstance(alone.outcome.end, PeerLost)


def test_the_notes_of_an_error_tell_who_had_answered(book):
    """The states of the others are part of the evidence."""
    call = make(1)
    book.accept(call)
    book.answer(1, 0, "a", now=0.0)
    error = ProtocolError("broken")
    book.error(1, 1, error, now=0.5)
    assert error.__notes__ == ["rank 0: answered"]


def test_a_late_answer_is_counted_and_dropped(book):
    """G05: it is nobody's, and least of all the next call's."""
    first, second = make(1, ranks=(0,)), make(2, ranks=(1,))
    book.accept(first)
    book.abandon(first)
    book.accept(second)
    book.answer(1, 0, "late", now=0.0)
    book.answer(1, 0, "later still", now=0.0)
    book.answer(99, 0, "whose?", now=0.0)
    assert book.late == 3
    assert not second.outcome.ends


def test_steps_are_sent_at_once(book):
    """Several may be under way."""
    steps = [make(number, Lane.STEP) for number in (1, 2, 3)]
    assert [book.accept(step) for step in steps] == [[step] for step in steps]


def test_a_control_call_waits_for_the_one_before_it_on_its_ranks(book):
    """So that it can be taken back from all ranks alike."""
    first, second = make(1), make(2)
    book.accept(first)
    assert book.accept(second) == []
    assert book.answer(1, 0, None, now=0.0) == []
    assert book.answer(1, 1, None, now=0.0) == [second]


def test_control_calls_on_different_ranks_do_not_wait_for_each_other(book):
    """Rank 1 is free while rank 0 works."""
    first, second = make(1, ranks=(0,)), make(2, ranks=(1,))
    assert book.accept(first) == [first]
    assert book.accept(second) == [second]


def test_a_step_does_not_overtake_a_control_call_that_waits(book):
    """Steps and plain control calls run in order of acceptance."""
    first, waiting, step = make(1), make(2), make(3, Lane.STEP)
    book.accept(first)
    book.accept(waiting)
    assert book.accept(step) == []
    book.answer(1, 0, None, now=0.0)
    assert book.answer(1, 1, None, now=0.0) == [waiting, step]


def test_an_async_call_passes_control_calls_and_no_step(book):
    """It waits for steps that were accepted before it, and for nothing else."""
    first, waiting, early = make(1), make(2), make(3, Lane.ASYNC)
    step, late = make(4, Lane.STEP), make(5, Lane.ASYNC)
    book.accept(first)
    book.accept(waiting)
    assert book.accept(early) == [early]
    assert book.accept(step) == []
    assert book.accept(late) == []
    book.answer(1, 0, None, now=0.0)
    assert book.answer(1, 1, None, now=0.0) == [waiting, step, late]


def test_a_liveness_call_waits_for_nothing(book):
    """Whatever is queued."""
    book.accept(make(1))
    book.accept(make(2))
    ping = make(3, Lane.LIVENESS)
    assert book.accept(ping) == [ping]


def test_a_call_given_up_in_the_queue_is_never_sent(book):
    """G29: and what it held up goes on."""
    first, given_up, step = make(1), make(2), make(3, Lane.STEP)
    book.accept(first)
    book.accept(given_up)
    book.accept(step)
    assert book.abandon(given_up) == [step]
    assert book.answer(1, 0, None, now=0.0) == book.answer(1, 1, None, now=0.0) == []
    assert isinstance(given_up.outcome.end, ActorStopped)


def test_a_step_given_up_in_the_queue_is_sent_all_the_same(book):
    """Later steps build on it: only its waiter is dropped."""
    first, waiting, step = make(1), make(2), make(3, Lane.STEP)
    for call in (first, waiting, step):
        book.accept(call)
    assert book.abandon(step) == []
    assert isinstance(step.outcome.end, ActorStopped)
    book.answer(1, 0, None, now=0.0)
    assert book.answer(1, 1, None, now=0.0) == [waiting, step]


def test_a_call_given_up_on_the_way_still_holds_its_ranks(book):
    """The rank is busy until it has answered, whoever waits."""
    first, second = make(1), make(2)
    book.accept(first)
    book.abandon(first)
    assert book.accept(second) == []
    book.answer(1, 0, None, now=0.0)
    assert book.answer(1, 1, None, now=0.0) == [second]


def test_deadlines_come_due_in_time(book):
    """Not before, and not for calls without one."""
    limited, free = make(1, Lane.STEP, timeout=1.0), make(2, Lane.STEP, slow_every=float("inf"))
    book.accept(limited)
    book.accept(free)
    assert book.next_wake() == 1.0
    assert book.due(0.9) == []
    assert book.due(1.0) == [limited]


def test_slow_calls_are_reported_ever_more_rarely(book):
    """G01: at most three times in ten intervals."""
    book.accept(make(1, slow_every=1.0))
    assert [now for now in range(11) if book.slow(float(now))] == [1, 3, 7]


def test_a_failure_ends_all_calls(book):
    """Each with its own error; a liveness call makes do with the answers it has."""
    call, queued, ping = make(1), make(2), make(3, Lane.LIVENESS)
    for each in (call, queued, ping):
        book.accept(each)
    book.answer(3, 1, "pong", now=0.0)
    book.fail_all(lambda call: ProtocolError(call.text))
    assert str(call.outcome.end) == "call_1 on ranks 0, 1"
    assert str(queued.outcome.end) == "call_2 on ranks 0, 1"
    assert ping.outcome.end == ["pong"]
    assert book.accept(make(4)), "the ranks are free again"


def test_a_rank_that_cannot_answer_a_liveness_call_counts_as_silent(book):
    """Health is a report, never an exception."""
    ping = make(1, Lane.LIVENESS)
    book.accept(ping)
    book.error(1, 0, ProtocolError("no"), now=0.0)
    book.answer(1, 1, "pong", now=0.0)
    assert ping.outcome.end == ["pong"]


def test_the_number_of_open_calls_is_bounded(book, monkeypatch):
    """One more is refused, and says so."""
    monkeypatch.setattr(collective, "MAX_OPEN", 2)
    book.accept(make(1))
    book.accept(make(2))
    with pytest.raises(MailboxFull, match=r"executor is full \(2 messages\)"):
        book.accept(make(3))


LANES = st.sampled_from([Lane.STEP, Lane.SYNC, Lane.ASYNC])
RANKS = st.sampled_from([(0,), (1,), (2,), (0, 2), (0, 1, 2)])
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("accept"), LANES, RANKS),
        st.tuples(st.just("answer"), st.integers(0, 60), st.just(None)),
        st.tuples(st.just("error"), st.integers(0, 60), st.just(None)),
        st.tuples(st.just("abandon"), st.integers(0, 60), st.just(None)),
    ),
    max_size=60,
)


@given(EVENTS)
def test_whatever_happens_each_call_ends_once_and_order_holds(events):
    """Each waiter has at most one end; steps and plain calls reach every rank in order of acceptance."""
    book = CallBook(3)
    calls: list[Call] = []
    sent: list[Call] = []
    for kind, first, second in events:
        open_parts = [(call, rank) for call in calls if call.sent for rank in sorted(call.missing)]
        if kind == "accept":
            calls.append(make(len(calls), first, (0, 1, 2) if first is Lane.STEP else second))
            sent += book.accept(calls[-1])
        elif kind == "abandon" and calls:
            sent += book.abandon(calls[first % len(calls)])
        elif kind != "abandon" and open_parts:
            call, rank = open_parts[first % len(open_parts)]
            sent += (
                book.answer(call.id, rank, rank, now=0.0)
                if kind == "answer"
                else book.error(call.id, rank, ProtocolError(), now=0.0)
            )
    assert all(len(call.outcome.ends) <= 1 for call in calls)
    for rank in range(3):
        ordered = [call.id for call in sent if call.lane is not Lane.ASYNC and rank in call.ranks]
        assert ordered == sorted(ordered)
        assert sum(call.lane is Lane.SYNC for call in book.under_way(rank)) <= 1
    steps_by = {call.id: place for place, call in enumerate(sent) if call.lane is Lane.STEP}
    for place, call in enumerate(sent):
        if call.lane is Lane.ASYNC:
            assert all(at < place for step, at in steps_by.items() if step < call.id)
    while book.open:
        call = next(call for call in book.open.values() if call.sent)
        book.answer(call.id, min(call.missing), 0, now=0.0)
    assert book.queued == 0
    assert all(len(call.outcome.ends) <= 1 for call in calls)
    assert all(call.outcome.ends for call in calls)


def test_everything_can_be_printed(book):
    """The book and its calls are read in dumps."""
    book.accept(make(1))
    book.accept(make(2, ranks=(0,)))
    assert repr(book) == "<CallBook: 2 open, 1 queued, 0 late answers>"
    assert [repr(call) for call in book.open.values()] == [
        "<Call 1: call_1 on ranks 0, 1, 0/2 answered>",
        "<Call 2: call_2 on rank 0, 0/1 answered>",
    ]
    assert isinstance(RemoteError(), AexecError)
