"""A request's life follows its table."""

from __future__ import annotations

import pytest

from aexec.engine.request import FINISH_REASONS, TRANSITIONS, Request, RequestStatus
from aexec.errors import ProtocolError
from aexec.messages.request import SamplingParams, TokenLogprobs


def make(prompt=(1, 2, 3), *, stop=(), max_num_tokens=8, **sampling):
    return Request("a", list(prompt), len(prompt), SamplingParams(**sampling), frozenset(stop), max_num_tokens)


@pytest.mark.parametrize("before", RequestStatus)
@pytest.mark.parametrize("after", RequestStatus)
def test_a_status_follows_another_only_by_the_table(before, after):
    """What the table does not list raises, and changes nothing."""
    request = make()
    request.status = before
    if after in TRANSITIONS[before]:
        request.move(after)
        assert request.status is after
    else:
        with pytest.raises(ProtocolError, match=f"request a is {before.value}: it cannot become {after.value}"):
            request.move(after)
        assert request.status is before


def test_every_request_can_end_and_nothing_follows_an_end():
    """Each status leads to an end, and ends have a reason or are failures."""
    ends = {status for status, following in TRANSITIONS.items() if not following}
    assert ends == {*FINISH_REASONS, RequestStatus.FINISHED_FAILED}
    assert all(following & ends for status, following in TRANSITIONS.items() if status not in ends)


def test_a_stop_token_ends_a_request_once_min_tokens_are_out():
    """A stop token among the first ``min_tokens`` tokens does not end it."""
    request = make(stop=[9], min_tokens=2)
    assert [request.take([9]), request.take([9]), request.take([9])] == [None, None, RequestStatus.FINISHED_STOPPED]
    assert request.stop_reason == 9


def test_a_request_ends_at_its_length():
    """The token that fills it up is its last."""
    request = make(max_num_tokens=5)
    assert [request.take([7]), request.take([7])] == [None, RequestStatus.FINISHED_LENGTH]
    assert request.stop_reason is None


def test_a_stop_token_at_the_last_place_is_a_stop():
    """Stopping wins over the length."""
    assert make(max_num_tokens=4, stop=[9]).take([9]) is RequestStatus.FINISHED_STOPPED


def test_a_recompute_does_not_repeat_prompt_logprobs():
    """After a preemption the prompt runs again; its log-probabilities count once."""
    entries = [TokenLogprobs(token, -1.0, 1, {}) for token in (2, 3)]
    request = make()
    request.add_prompt_logprobs(0, entries[:1])
    request.forget_computed()
    request.add_prompt_logprobs(1, entries[1:])  # of a step that was in flight
    request.add_prompt_logprobs(0, entries)
    request.forget_computed()
    request.add_prompt_logprobs(0, entries[:1])
    request.add_prompt_logprobs(1, entries[1:])
    assert request.prompt_logprobs == entries


def test_a_request_prints_what_it_is_at():
    """The repr tells status, tokens and preemptions."""
    request = make()
    request.take([5])
    assert repr(request) == "<Request a: waiting, 3 + 1 tokens, 0 computed, 0 preemption(s)>"
    assert (request.num_new_tokens, request.is_prefill, request.is_finished) == (4, True, False)
