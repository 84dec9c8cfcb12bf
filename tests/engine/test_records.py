"""Batches in flight: what comes back is for the requests as they were, and no others."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aexec.config import SchedulerConfig
from aexec.engine.blocks import BlockPool
from aexec.engine.records import check_output
from aexec.engine.request import Request, RequestStatus
from aexec.engine.scheduler import Scheduler
from aexec.errors import ProtocolError
from aexec.messages.batch import PLACEHOLDER, ModelRunnerOutput, SchedulerOutput
from aexec.messages.request import SamplingParams, TokenLogprobs


def make(name, num_prompt=4, max_tokens=8, **settings):
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **settings)
    return Request(name, [5] * num_prompt, num_prompt, params, frozenset([0]), num_prompt + max_tokens)


def make_scheduler(*, overlaps=False, num_blocks=64, **config):
    return Scheduler(SchedulerConfig(**config), BlockPool(num_blocks, 4), lambda: 1, overlaps=overlaps)


def output(batch_or_ids, token=7, **more):
    """Say that each of these was sampled."""
    ids = list(batch_or_ids)
    return ModelRunnerOutput(request_ids=ids, sampled_token_ids=[[token] for _ in ids], **more)


def test_a_chunk_whose_successor_is_scheduled_already_has_no_token_to_miss():
    """The step that runs the rest of the prompt is in flight; the first one has sampled nobody."""
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make("a", 8))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == ({"a": 4}, {"a": 4})
    assert scheduler.update(first, ModelRunnerOutput()) == []
    (update,) = scheduler.update(second, output("a"))
    assert (update.token_ids, update.error) == ([7], None)


def test_a_missing_token_is_noticed_in_the_step_that_should_have_brought_it():
    """Whatever has been scheduled since."""
    scheduler = make_scheduler(overlaps=True)
    scheduler.add(make("a"))
    first, _ = scheduler.schedule(), scheduler.schedule()
    (update,) = scheduler.update(first, ModelRunnerOutput())
    assert update.error == "the model runner returned no token for it"


def test_a_token_on_the_way_to_a_preempted_request_is_kept():
    """It is right; the request waits for it, so that it is not sampled twice."""
    scheduler = make_scheduler(num_blocks=9)
    early, late = make("early", 14, 4), make("late", 13, 4)
    for request in (early, late):
        scheduler.add(request)
    batch = scheduler.schedule(max_num_requests=1)
    both = scheduler.schedule()
    assert (list(batch.num_scheduled_tokens), list(both.num_scheduled_tokens)) == (["early"], ["late"])
    scheduler.preempt_all()
    assert scheduler.schedule().num_scheduled_tokens == {}
    (update,) = scheduler.update(batch, output(["early"]))
    assert (update.token_ids, early.status) == ([7], RequestStatus.PREEMPTED)
    again = scheduler.schedule()
    assert [(new.request_id, new.token_ids[-1]) for new in again.new] == [("early", 7)]
    (update,) = scheduler.update(both, output(["late"], token=0))
    assert (update.request, late.status, late.stop_reason) == (late, RequestStatus.FINISHED_STOPPED, 0)


def test_what_comes_for_an_id_that_is_used_again_is_not_the_new_requests():
    """The old one's token is nobody's."""
    scheduler = make_scheduler()
    scheduler.add(make("a"))
    old = scheduler.schedule()
    scheduler.finish("a", RequestStatus.FINISHED_ABORTED)
    scheduler.add(again := make("a"))
    new = scheduler.schedule()
    assert (new.finished_request_ids, new.new[0].request_id) == (["a"], "a")
    assert scheduler.update(old, output("a", token=9)) == []
    scheduler.update(new, output("a", token=7))
    assert again.token_ids == [5, 5, 5, 5, 7]


def test_overlapped_steps_go_on_with_placeholders_up_to_the_last_token():
    """A token is told when it is known, else a placeholder; none is sampled after the length is reached."""
    scheduler = make_scheduler(overlaps=True)
    scheduler.add(request := make("a", max_tokens=3))
    first, second, third = (scheduler.schedule() for _ in range(3))
    assert [each.cached.new_token_ids for each in (first, second, third)] == [[], [[PLACEHOLDER]], [[PLACEHOLDER]]]
    assert scheduler.schedule().num_scheduled_tokens == {}
    assert request.num_placeholders == 3
    for batch, token in ((first, 7), (second, 8), (third, 9)):
        scheduler.update(batch, output("a", token))
    assert (request.token_ids[4:], request.status) == ([7, 8, 9], RequestStatus.FINISHED_LENGTH)
    assert request.num_placeholders == 0


def test_a_token_that_came_meanwhile_is_told_itself():
    """The runners have sampled it, and are told it like any other."""
    scheduler = make_scheduler(overlaps=True)
    scheduler.add(make("a"))
    first = scheduler.schedule()
    scheduler.update(first, output("a", 7))
    assert scheduler.schedule().cached.new_token_ids == [[7]]


def test_a_token_behind_a_stop_is_passed_over():
    """The request ended with the step before."""
    scheduler = make_scheduler(overlaps=True)
    scheduler.add(request := make("a"))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update(first, output("a", 0))
    assert scheduler.update(second, output("a", 7)) == []
    assert (request.token_ids[4:], scheduler.schedule().finished_request_ids) == ([0], ["a"])


def test_a_lost_batch_ends_its_requests_and_has_those_behind_it_computed_again():
    """They may share blocks that were never computed."""
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(make(name))
    first, second = scheduler.schedule(max_num_requests=1), scheduler.schedule()
    assert scheduler.lose(first) == ["a"]
    scheduler.finish("a", RequestStatus.FINISHED_FAILED)
    assert scheduler.get("b").status is RequestStatus.PREEMPTED
    assert scheduler.update(second, output("b", 9)) == []
    again = scheduler.schedule()
    assert [(new.request_id, new.token_ids) for new in again.new] == [("b", [5, 5, 5, 5])]
    assert set(again.finished_request_ids) == {"a", "b"}


def test_a_batch_behind_a_lost_one_that_fails_too_ends_nobody():
    """It failed because of the other."""
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(make(name))
    first, second = scheduler.schedule(max_num_requests=1), scheduler.schedule()
    scheduler.lose(first)
    again = scheduler.schedule()
    assert "b" not in again.num_scheduled_tokens  # its token may still come
    assert scheduler.lose(second) == []


def test_whom_the_runners_know_by_now_is_not_forgotten_again():
    """A lost batch told them to forget a request that has begun anew since."""
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(make(name))
    first = scheduler.schedule()
    scheduler.update(first, output("ab"))
    scheduler.finish("b", RequestStatus.FINISHED_ABORTED)
    forgets = scheduler.schedule()
    assert forgets.finished_request_ids == ["b"]
    scheduler.add(make("b"))
    assert [new.request_id for new in scheduler.schedule().new] == ["b"]
    scheduler._records.discard(forgets)
    scheduler.lose(SchedulerOutput(finished_request_ids=forgets.finished_request_ids))
    assert scheduler.farewell().finished_request_ids == []


def test_prompt_logprobs_of_a_step_in_flight_survive_a_preemption():
    """They fill their own places, whichever run of the prompt they come from."""
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(request := make("a", 8, prompt_logprobs=0))
    entries = [TokenLogprobs(5, -float(place), 1, {}) for place in range(7)]
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update(first, ModelRunnerOutput(prompt_logprobs={"a": entries[:4]}))
    scheduler.preempt_all()
    scheduler.update(second, output("a", prompt_logprobs={"a": entries[4:]}))
    assert request.prompt_logprobs == entries
    again = scheduler.schedule()
    scheduler.update(again, ModelRunnerOutput(prompt_logprobs={"a": entries[:4]}))
    assert request.prompt_logprobs == entries


def test_a_batch_comes_back_once():
    """Twice, or from elsewhere, is a fault."""
    scheduler = make_scheduler()
    scheduler.add(make("a"))
    batch = scheduler.schedule()
    assert [request.request_id for request in scheduler.sampled(batch)] == ["a"]
    assert repr(scheduler._records) == "<BatchRecords: 1 batches, 1 requests>"
    scheduler.update(batch, output("a"))
    with pytest.raises(ProtocolError, match="a batch came back that is not in flight"):
        scheduler.update(batch, output("a"))


@pytest.mark.parametrize(
    "wrong",
    [
        ModelRunnerOutput(request_ids=["a"], sampled_token_ids=[]),
        ModelRunnerOutput(request_ids=["a"], sampled_token_ids=[[1]], logprobs=[]),
    ],
)
def test_an_output_whose_columns_differ_is_refused(wrong):
    """And nothing of it is taken."""
    with pytest.raises(ProtocolError, match=r"the columns of ModelRunnerOutput have lengths \[0, 1\]"):
        check_output(wrong)


@settings(max_examples=80, deadline=None)
@given(
    depth=st.integers(1, 4),
    overlaps=st.booleans(),
    mix=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8)), min_size=1, max_size=8),
    num_blocks=st.integers(9, 24),
    share=st.integers(1, 8),
)
def test_any_number_of_steps_in_flight_gives_every_request_its_own_tokens(depth, overlaps, mix, num_blocks, share):
    """The n-th token of a request is n; whatever is in flight, none is lost, doubled or out of place."""
    scheduler = make_scheduler(overlaps=overlaps, num_blocks=num_blocks, max_num_batched_tokens=16)
    requests = [make(f"r{place}", *sizes) for place, sizes in enumerate(mix)]
    known: dict[str, int] = {}
    for request in requests:
        request.stop_token_ids = frozenset()
        scheduler.add(request)
    flights = []
    for _ in itertools.count():
        while len(flights) < depth:
            batch = scheduler.schedule(max_num_requests=share)
            for name in batch.finished_request_ids:
                known.pop(name, None)
            if not batch.num_scheduled_tokens:
                scheduler.lose(batch)
                break
            known |= {new.request_id: len(new.token_ids) for new in batch.new}
            for name, tokens in zip(batch.cached.request_ids, batch.cached.new_token_ids, strict=True):
                known[name] += len(tokens)
            sampled = {request.request_id: known[request.request_id] for request in scheduler.sampled(batch)}
            flights.append((batch, sampled))
        if not flights:
            break
        batch, sampled = flights.pop(0)
        scheduler.update(
            batch, ModelRunnerOutput(request_ids=list(sampled), sampled_token_ids=[[n] for n in sampled.values()])
        )
        scheduler._blocks.check_integrity()
    for request in requests:
        assert request.status is RequestStatus.FINISHED_LENGTH
        assert request.token_ids[request.num_prompt_tokens :] == list(
            range(request.num_prompt_tokens, request.max_num_tokens)
        )
