"""The scheduler's promises, checked against any mix of requests and events."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aexec.config import SchedulerConfig
from aexec.engine.blocks import BlockPool
from aexec.engine.request import Request, RequestStatus
from aexec.engine.samples import samples_of
from aexec.engine.scheduler import Scheduler
from aexec.errors import InvalidRequest, QueueFull
from aexec.messages.batch import ModelRunnerOutput, SchedulerOutput
from aexec.messages.request import SamplingParams

EOS = 2


def token_after(tokens):
    """A model: the next token depends on all before it, and is sometimes EOS."""
    return (sum(tokens) * 31 + len(tokens) * 17) % 11 + 2


class Runner:
    """A model runner that believes nothing: it rebuilds every request from the deltas."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.known: dict[str, list[int]] = {}
        self.blocks: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}

    def run(self, batch: SchedulerOutput) -> ModelRunnerOutput:
        for name in batch.finished_request_ids:
            del self.known[name], self.blocks[name], self.computed[name]
        for new in batch.new:
            assert new.request_id not in self.known
            self.known[new.request_id] = list(new.token_ids)
            self.blocks[new.request_id] = list(new.block_ids)
            self.computed[new.request_id] = new.num_computed_tokens
        columns = batch.cached
        for name, tokens, blocks, computed in zip(
            columns.request_ids,
            columns.new_token_ids,
            columns.new_block_ids,
            columns.num_computed_tokens,
            strict=True,
        ):
            self.known[name] += tokens
            self.blocks[name] += blocks
            assert self.computed[name] == computed
        held = [block for name in batch.num_scheduled_tokens for block in self.blocks[name]]
        assert len(held) == len(set(held))
        assert 0 not in held
        sampled = {}
        for name, count in batch.num_scheduled_tokens.items():
            self.computed[name] += count
            assert self.computed[name] <= len(self.known[name])
            assert self.computed[name] <= len(self.blocks[name]) * self.block_size
            if self.computed[name] == len(self.known[name]):
                sampled[name] = [token_after(self.known[name])]
        return ModelRunnerOutput(request_ids=list(sampled), sampled_token_ids=list(sampled.values()))


def make(name, num_prompt=4, max_tokens=4, **sampling):
    params = SamplingParams(max_tokens=max_tokens, **({"temperature": 0.0} | sampling))
    prompt = [(len(name) + place) % 7 + 3 for place in range(num_prompt)]
    return Request(name, prompt, num_prompt, params, frozenset([EOS]), num_prompt + max_tokens)


def make_scheduler(num_blocks=64, block_size=4, *, budget=16, num_seqs=8, num_waiting=64):
    config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=num_seqs, max_num_waiting=num_waiting)
    seeds = itertools.count(100)
    return Scheduler(config, BlockPool(num_blocks, block_size), lambda: next(seeds))


def alone(request: Request) -> list[int]:
    """What a request generates when nothing else runs."""
    tokens = list(request.token_ids)
    while True:
        tokens.append(token_after(tokens))
        if tokens[-1] == EOS or len(tokens) == request.max_num_tokens:
            return tokens[request.num_prompt_tokens :]


def run_to_end(scheduler, runner, *, between=lambda step: None):
    """Run until nothing is left; checks the budgets at each step."""
    updates = []
    between(0)
    for step in itertools.count(1):
        if not scheduler.has_work:
            break
        batch = scheduler.schedule()
        assert 0 < batch.total_num_scheduled_tokens <= scheduler._config.max_num_batched_tokens
        assert len(scheduler._running) <= scheduler._config.max_num_seqs
        updates += scheduler.update(batch, runner.run(batch))
        scheduler._blocks.check_integrity()
        between(step)
    return updates


mixes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=12)


@settings(max_examples=120, deadline=None)
@given(mix=mixes, num_blocks=st.integers(14, 40), budget=st.integers(1, 40), num_seqs=st.integers(1, 6), data=st.data())
def test_every_request_ends_once_with_the_tokens_it_has_alone(mix, num_blocks, budget, num_seqs, data):
    """Whatever is mixed, chunked, preempted or aborted: each request ends once, and no token changes."""
    scheduler = make_scheduler(num_blocks, budget=budget, num_seqs=num_seqs)
    runner = Runner(4)
    requests = [make(f"r{place}", *sizes) for place, sizes in enumerate(mix)]
    wanted = {request.request_id: alone(request) for request in requests}
    arrivals = {request.request_id: data.draw(st.integers(0, 20), label="arrives at") for request in requests}
    aborted = {name: at for name in wanted if (at := data.draw(st.integers(0, 80), label="aborted at")) < 40}

    def between(step):
        for request in requests:
            if arrivals[request.request_id] == min(step, 20):
                scheduler.add(request)
                arrivals[request.request_id] = -1
            if aborted.get(request.request_id) == step and arrivals[request.request_id] == -1:
                scheduler.finish(request.request_id, RequestStatus.FINISHED_ABORTED)

    for step in range(21):
        between(step)
        if scheduler.has_work:
            batch = scheduler.schedule()
            scheduler.update(batch, runner.run(batch))
    offset = 21
    run_to_end(scheduler, runner, between=lambda step: between(step + offset))
    for request in requests:
        output = request.token_ids[request.num_prompt_tokens :]
        if request.status is RequestStatus.FINISHED_ABORTED:
            assert output == wanted[request.request_id][: len(output)]
        else:
            assert output == wanted[request.request_id]
        assert request.is_finished
    statistics = scheduler.statistics()
    assert statistics.num_finished == len(requests)
    assert statistics.blocks.num_free_blocks == statistics.blocks.num_blocks


@settings(max_examples=60, deadline=None)
@given(mix=mixes, num_blocks=st.integers(14, 40), budget=st.integers(1, 40))
def test_requests_are_admitted_in_order_of_arrival(mix, num_blocks, budget):
    """No request runs its first token before one that came earlier, nor while an earlier one waits."""
    scheduler, runner = make_scheduler(num_blocks, budget=budget), Runner(4)
    order = [f"r{place}" for place in range(len(mix))]
    for name, sizes in zip(order, mix, strict=True):
        scheduler.add(make(name, *sizes))
    first_seen: list[str] = []
    while scheduler.has_work:
        batch = scheduler.schedule()
        lined_up = [*scheduler._running, *(request.request_id for request in scheduler._waiting)]
        assert lined_up == sorted(lined_up, key=order.index)
        first_seen += [name for name in batch.num_scheduled_tokens if name not in first_seen]
        scheduler.update(batch, runner.run(batch))
    assert first_seen == order


def test_each_update_belongs_to_one_sampled_token():
    """A request has one update per new token, and its last one carries the finish."""
    scheduler = make_scheduler()
    requests = [make("a", 5, 3), make("b", 30, 2)]
    for request in requests:
        scheduler.add(request)
    updates = run_to_end(scheduler, Runner(4))
    assert Counter(update.request.request_id for update in updates) == {
        request.request_id: request.num_output_tokens for request in requests
    }


def test_a_long_prompt_is_cut_into_chunks_beside_the_decodes():
    """Decodes run in each step, first; the rest of the budget goes to the prompt."""
    scheduler, runner = make_scheduler(budget=8), Runner(4)
    short = make("short", 2, 12)
    short.stop_token_ids = frozenset()
    scheduler.add(short)
    batch = scheduler.schedule()
    scheduler.update(batch, runner.run(batch))
    scheduler.add(make("long", 30, 2))
    batches = []
    for _ in range(3):
        batches.append(scheduler.schedule())
        scheduler.update(batches[-1], runner.run(batches[-1]))
    assert [dict(batch.num_scheduled_tokens) for batch in batches] == [{"short": 1, "long": 7}] * 3
    assert all(next(iter(batch.num_scheduled_tokens)) == "short" for batch in batches)


def test_the_latest_request_gives_way_and_starts_over_with_what_it_generated():
    """Preemption takes the latest one's blocks, makes the runners forget it, and loses no token."""
    scheduler, runner = make_scheduler(num_blocks=7, budget=64), Runner(4)
    first, second = make("first", 8, 12), make("second", 8, 12)
    first.stop_token_ids = second.stop_token_ids = frozenset()
    for request in (first, second):
        scheduler.add(request)
    forgotten = []
    while scheduler.has_work:
        batch = scheduler.schedule()
        forgotten += batch.finished_request_ids
        if any(new.request_id == "second" for new in batch.new) and second.num_preemptions:
            (again,) = batch.new
            assert len(again.token_ids) > again.num_prompt_tokens == 8
        scheduler.update(batch, runner.run(batch))
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert scheduler.statistics().num_preemptions == 1
    assert forgotten[0] == "second"


def test_an_abort_frees_blocks_at_once_and_the_step_in_flight_is_ignored():
    """What a step still brings for an aborted request changes nothing."""
    scheduler, runner = make_scheduler(), Runner(4)
    scheduler.add(make("a", 8))
    batch = scheduler.schedule()
    output = runner.run(batch)
    assert scheduler.finish("a", RequestStatus.FINISHED_ABORTED) is not None
    assert scheduler.statistics().blocks.num_holders == 0
    assert scheduler.update(batch, output) == []
    assert scheduler.finish("a", RequestStatus.FINISHED_ABORTED) is None
    scheduler.add(make("b", 3))
    assert scheduler.schedule().finished_request_ids == ["a"]


def test_a_request_that_waits_can_be_aborted_and_the_runners_never_hear_of_it():
    """Its id is free again, and nothing is reported."""
    scheduler = make_scheduler(num_seqs=1)
    scheduler.add(make("a"))
    scheduler.add(make("b"))
    scheduler.schedule()
    scheduler.finish("b", RequestStatus.FINISHED_ABORTED)
    scheduler.add(make("b"))
    assert scheduler._to_forget == []


def test_whom_to_forget_is_said_again_when_a_batch_was_lost():
    """A failed step may never have reached the runners."""
    scheduler, runner = make_scheduler(), Runner(4)
    for name in ("a", "b"):
        scheduler.add(make(name))
    batch = scheduler.schedule()
    scheduler.update(batch, runner.run(batch))
    scheduler.finish("a", RequestStatus.FINISHED_ABORTED)
    lost = scheduler.schedule()
    assert lost.finished_request_ids == ["a"]
    scheduler.lose(lost)
    scheduler.finish("b", RequestStatus.FINISHED_FAILED)
    assert scheduler.farewell() == SchedulerOutput(finished_request_ids=["a", "b"])
    assert scheduler.farewell() == SchedulerOutput()


def test_the_next_batch_can_be_decided_while_one_is_in_flight():
    """Requests whose next token is being sampled are passed over; others run."""
    scheduler = make_scheduler(budget=4, num_seqs=2)
    scheduler.add(make("a", 4))
    scheduler.add(make("b", 4))
    assert [scheduler.schedule().num_scheduled_tokens for _ in range(3)] == [{"a": 4}, {"b": 4}, {}]


def test_errors_of_one_request_end_that_request_only():
    """A row error, and a row that is missing, fail their own requests."""
    scheduler = make_scheduler()
    for name in ("good", "bad", "lost"):
        scheduler.add(make(name, 3))
    batch = scheduler.schedule()
    output = ModelRunnerOutput(request_ids=["good"], sampled_token_ids=[[5]], errors={"bad": "NaN logits"})
    updates = {update.request.request_id: update for update in scheduler.update(batch, output)}
    assert (updates["good"].token_ids, updates["good"].error) == ([5], None)
    assert updates["bad"].error == "NaN logits"
    assert updates["lost"].error == "the model runner returned no token for it"
    assert scheduler.statistics()[:2] == (1, 0)


def sharing_scheduler():
    config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8, max_num_waiting=8)
    return Scheduler(config, BlockPool(64, 4), lambda: 0, prefix_caching=True)


def test_who_shares_what_a_failed_request_computed_begins_afresh():
    """It came while that step was in flight, and what its own step samples rests on wrong KV."""
    scheduler = sharing_scheduler()
    bad, sharer = make("x", 13), make("y", 17)
    scheduler.add(bad)
    first = scheduler.schedule()
    scheduler.add(sharer)
    second = scheduler.schedule()
    assert sharer.num_cached_tokens == 12
    (update,) = scheduler.update(first, ModelRunnerOutput(errors={"x": "NaN logits"}))
    assert update.request is bad
    assert scheduler.update(second, ModelRunnerOutput(request_ids=["y"], sampled_token_ids=[[5]])) == []
    (new,) = scheduler.schedule().new
    assert (new.request_id, new.num_computed_tokens) == ("y", 0)


def test_requests_that_fail_together_end_together():
    """None of those that have computed the same is begun afresh for another's sake."""
    scheduler = sharing_scheduler()
    scheduler.add(make("x", 9))
    scheduler.add(make("y", 9))
    batch = scheduler.schedule()
    updates = scheduler.update(batch, ModelRunnerOutput(errors={"x": "NaN logits", "y": "NaN logits"}))
    assert [update.error for update in updates] == ["NaN logits"] * 2
    assert not scheduler.has_work


@pytest.mark.parametrize("how", ["refused", "finished"])
def test_a_failure_that_is_not_the_models_leaves_its_kv_to_others(how):
    """No mask, no token that may come: what was computed is right."""
    scheduler = sharing_scheduler()
    scheduler.add(make("x", 13))
    batch = scheduler.schedule()
    if how == "finished":
        scheduler.finish("x", RequestStatus.FINISHED_FAILED)
    scheduler.update(batch, ModelRunnerOutput(errors={"x": "no token may come"}, refused=frozenset({"x"})))
    scheduler.add(make("y", 13))
    (new,) = scheduler.schedule().new
    assert new.num_computed_tokens == 12


def test_a_request_that_ended_before_the_model_failed_it_leaves_nothing_to_share():
    """It was aborted while its step was in flight."""
    scheduler = sharing_scheduler()
    scheduler.add(make("x", 13))
    batch = scheduler.schedule()
    scheduler.finish("x", RequestStatus.FINISHED_ABORTED)
    assert scheduler.update(batch, ModelRunnerOutput(errors={"x": "NaN logits"})) == []
    scheduler.add(make("y", 13))
    (new,) = scheduler.schedule().new
    assert new.num_computed_tokens == 0


def test_sampled_requests_get_a_seed_and_greedy_ones_do_not():
    """A seed that the caller gave is kept."""
    scheduler = make_scheduler()
    for name, params in {"greedy": {}, "drawn": {"temperature": 1.0}, "given": {"temperature": 1.0, "seed": 7}}.items():
        scheduler.add(make(name, **params))
    seeds = {new.request_id: new.sampling.seed for new in scheduler.schedule().new}
    assert seeds == {"greedy": None, "drawn": 100, "given": 7}


def test_a_request_that_can_never_fit_is_refused_up_front():
    """The error names the need, what there is, and the remedy; a fit to the last slot is taken."""
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make("fits", 8, 5))
    with pytest.raises(InvalidRequest, match=r"may grow to 14 tokens and the KV cache holds 12.*num_blocks"):
        scheduler.add(make("never", 8, 6))
    assert len(run_to_end(scheduler, Runner(4))) >= 1


def test_ids_are_unique_among_live_requests():
    """An id in use is refused, and the first request is not touched."""
    scheduler = make_scheduler()
    scheduler.add(make("a"))
    with pytest.raises(InvalidRequest, match="request id 'a' is in use"):
        scheduler.add(make("a"))
    assert scheduler.statistics().num_waiting == 1


def test_the_waiting_queue_is_bounded():
    """One more than may wait is turned away, and leaves no trace."""
    scheduler = make_scheduler(num_waiting=2)
    for name in "ab":
        scheduler.add(make(name))
    with pytest.raises(QueueFull, match="request c was turned away"):
        scheduler.add(make("c"))
    scheduler.finish("a", RequestStatus.FINISHED_ABORTED)
    scheduler.add(make("c"))
    assert repr(scheduler) == "<Scheduler: 0 running, 2 waiting, 0 steps, 0 preemption(s)>"


def test_a_request_that_waits_for_its_grammar_holds_up_nobody():
    """It is no work to do, and takes its place by arrival once it is ready; an unknown id is nobody's."""
    scheduler = make_scheduler(num_seqs=1)
    constrained = make("constrained")
    constrained.status = RequestStatus.WAITING_FOR_GRAMMAR
    scheduler.add(constrained)
    assert not scheduler.has_work
    for name in ("other", "last"):
        scheduler.add(make(name, max_tokens=1))
    batch, runner = scheduler.schedule(), Runner(4)
    assert list(batch.num_scheduled_tokens) == ["other"]
    scheduler.make_ready("constrained")
    scheduler.make_ready("nobody")
    scheduler.update(batch, runner.run(batch))
    assert list(scheduler.schedule().num_scheduled_tokens) == ["constrained"]


def test_a_follower_that_ends_is_not_taken_for_another_of_its_id():
    """An id may be used again while the sample that computes the prompt goes on."""
    scheduler = make_scheduler(budget=4)
    first, follower = samples_of(make("a", 9, temperature=1.0, n=2))
    scheduler.add(first, follower)
    scheduler.schedule()
    scheduler.finish("a#1", RequestStatus.FINISHED_ABORTED)
    again = make("a#1")
    again.status = RequestStatus.WAITING_FOR_GRAMMAR
    scheduler.add(again)
    for _ in range(2):
        scheduler.schedule()
    assert (first.num_computed_tokens, list(scheduler._running)) == (9, ["a"])


def test_those_who_had_given_way_before_a_crash_had_begun_too():
    """All that begin afresh are counted; only those that ran lose what was computed."""
    scheduler, runner = Scheduler(SchedulerConfig(), BlockPool(64, 4), lambda: 1), Runner(4)
    for name in "ab":
        scheduler.add(make(name))
    batch = scheduler.schedule()
    scheduler.update(batch, runner.run(batch))
    scheduler.add(make("waits"))
    scheduler.schedule(admits=False, alone="a")  # b gives way
    num_computed = scheduler.get("a").num_computed_tokens
    assert scheduler.get("b").status is RequestStatus.PREEMPTED
    assert scheduler.recover() == (2, num_computed)
