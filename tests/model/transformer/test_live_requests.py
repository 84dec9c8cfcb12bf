"""Deltas of the scheduler, applied."""

from __future__ import annotations

import pytest

from aexec.errors import ProtocolError
from aexec.messages import CachedRequestData, NewRequestData, SamplingParams, SchedulerOutput
from aexec.messages.batch import PLACEHOLDER
from aexec.model.transformer.live_requests import LiveRequests

GREEDY = SamplingParams(temperature=0.0)


def new(name: str, num_tokens: int = 5, blocks: tuple[int, ...] = (3, 4), computed: int = 0) -> NewRequestData:
    return NewRequestData(
        request_id=name,
        token_ids=list(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        block_ids=list(blocks),
        num_computed_tokens=computed,
        sampling=GREEDY,
    )


def cached(name: str, tokens: list[int], blocks: list[int], computed: int) -> CachedRequestData:
    return CachedRequestData(
        request_ids=[name], new_token_ids=[tokens], new_block_ids=[blocks], num_computed_tokens=[computed]
    )


def test_a_new_request_is_known_with_its_tokens_and_blocks() -> None:
    """It runs from the first token that is not computed, and all its blocks are fresh."""
    live = LiveRequests()
    assert live.apply(SchedulerOutput(new=[new("a")]), block_size=4) == [3, 4]
    (share,) = live.shares({"a": 5})
    assert (share.token_ids, share.block_ids.tolist(), share.start, share.stop) == ([0, 1, 2, 3, 4], [3, 4], 0, 5)


def test_blocks_that_hold_computed_tokens_are_not_fresh() -> None:
    """They must not be zeroed: their KV is what the request was sent with."""
    live = LiveRequests()
    assert live.apply(SchedulerOutput(new=[new("a", 9, (3, 4, 5), computed=5)]), block_size=4) == [5]


def test_cached_requests_grow_by_what_is_new() -> None:
    """Tokens and blocks are appended, and the request runs from where the scheduler says."""
    live = LiveRequests()
    live.apply(SchedulerOutput(new=[new("a")]), block_size=4)
    assert live.apply(SchedulerOutput(cached=cached("a", [77], [9], 5)), block_size=4) == [9]
    (share,) = live.shares({"a": 1})
    assert (share.token_ids[-1], share.block_ids.tolist(), share.start, share.stop) == (77, [3, 4, 9], 5, 6)


def test_finished_requests_are_forgotten_before_all_else() -> None:
    """A preempted request may come back as new in the very step that drops it."""
    live = LiveRequests()
    live.apply(SchedulerOutput(new=[new("a")]), block_size=4)
    live.apply(SchedulerOutput(finished_request_ids=["a"], new=[new("a", 6, (8, 9))]), block_size=4)
    assert len(live) == 1
    assert live["a"].block_ids.tolist() == [8, 9]
    assert repr(live) == "<LiveRequests: 1 with 2 blocks>"


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (SchedulerOutput(new=[new("a")]), "request a is sent as new and is live already"),
        (SchedulerOutput(cached=cached("b", [], [], 0)), "request b is not known to the runner"),
    ],
)
def test_contradictions_are_refused(batch, words) -> None:
    """A request that is new twice, or that nobody introduced, ends the step with an error that names it."""
    live = LiveRequests()
    live.apply(SchedulerOutput(new=[new("a")]), block_size=4)
    with pytest.raises(ProtocolError, match=words):
        live.apply(batch, block_size=4)


def test_a_placeholder_becomes_the_token_that_the_rank_sampled() -> None:
    """It is appended like one that was told."""
    live = LiveRequests()
    live.apply(SchedulerOutput(new=[new("a")]), block_size=4)
    live["a"].sampling.sampled = 77
    live.apply(SchedulerOutput(cached=cached("a", [PLACEHOLDER], [], 5)), block_size=4)
    assert live["a"].token_ids == [0, 1, 2, 3, 4, 77]


def test_ranks_that_share_layers_are_told_by_the_one_that_samples() -> None:
    """All placeholders of a step at once, in batch order; the others bring nothing of their own."""
    asked = []

    def tell(sampled: list[int | None]) -> list[int]:
        asked.append(sampled)
        return [70 + place for place in range(len(sampled))]

    live = LiveRequests(tell)
    live.apply(SchedulerOutput(new=[new(name) for name in "abc"]), block_size=4)
    columns = CachedRequestData(
        request_ids=list("abc"),
        new_token_ids=[[PLACEHOLDER], [9], [PLACEHOLDER]],
        new_block_ids=[[], [], []],
        num_computed_tokens=[5, 5, 5],
    )
    live.apply(SchedulerOutput(cached=columns), block_size=4)
    assert asked == [[None, None]]
    assert [live[name].token_ids[-1] for name in "abc"] == [70, 9, 71]
    live.apply(SchedulerOutput(cached=cached("a", [1], [], 6)), block_size=4)
    assert len(asked) == 1


def test_a_placeholder_without_a_token_is_refused() -> None:
    """The step that samples it was never sampled here."""
    live = LiveRequests()
    live.apply(SchedulerOutput(new=[new("a")]), block_size=4)
    with pytest.raises(ProtocolError, match="1 requests are to go on with the token sampled last, and none was"):
        live.apply(SchedulerOutput(cached=cached("a", [PLACEHOLDER], [], 5)), block_size=4)
