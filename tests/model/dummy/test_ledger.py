"""The ledger believes a consistent scheduler and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aexec.errors import ProtocolError
from aexec.messages import CachedRequestData, NewRequestData, SamplingParams, SchedulerOutput
from aexec.messages.batch import PLACEHOLDER
from aexec.model.dummy.ledger import BatchLedger

GREEDY = SamplingParams(temperature=0.0)


def new(
    name: str, tokens: list[int], blocks: list[int], computed: int = 0, prompt: int | None = None
) -> NewRequestData:
    """A request whose tokens are all prompt unless told otherwise."""
    return NewRequestData(
        request_id=name,
        token_ids=tokens,
        num_prompt_tokens=len(tokens) if prompt is None else prompt,
        block_ids=blocks,
        num_computed_tokens=computed,
        sampling=GREEDY,
    )


def cached(name: str, tokens: list[int], blocks: list[int], computed: int) -> CachedRequestData:
    """Columns of one request."""
    return CachedRequestData(
        request_ids=[name], new_token_ids=[tokens], new_block_ids=[blocks], num_computed_tokens=[computed]
    )


@pytest.fixture
def ledger() -> BatchLedger:
    """Nine blocks of four; request ``a`` has six prompt tokens in two of them, four of which are computed."""
    ledger = BatchLedger(num_blocks=10, block_size=4, max_model_len=12, vocab_size=100)
    ledger.apply(SchedulerOutput(new=[new("a", [1, 2, 3, 4, 5, 6], [1, 2])], num_scheduled_tokens={"a": 4}))
    return ledger


def test_a_request_runs_from_chunk_to_chunk_and_on(ledger: BatchLedger) -> None:
    """It is sampled when a span reaches its last token; a sampled token comes back and is run."""
    assert [
        span.is_sampled
        for span in ledger.apply(SchedulerOutput(cached=cached("a", [], [], 4), num_scheduled_tokens={"a": 1}))
    ] == [False]
    (span,) = ledger.apply(SchedulerOutput(cached=cached("a", [], [], 5), num_scheduled_tokens={"a": 1}))
    assert (span.start, span.end, span.is_sampled) == (5, 6, True)
    span.entry.unheard = [42]
    (span,) = ledger.apply(SchedulerOutput(cached=cached("a", [42], [], 6), num_scheduled_tokens={"a": 1}))
    assert span.entry.token_ids == [1, 2, 3, 4, 5, 6, 42]
    assert repr(ledger) == "<BatchLedger: 1 live requests, 2/9 blocks held>"


CONTRADICTIONS: dict[str, tuple[SchedulerOutput, str]] = {
    "new twice": (SchedulerOutput(new=[new("a", [1], [5])]), "is sent as new and is live already"),
    "no prompt": (SchedulerOutput(new=[new("b", [1], [5], prompt=0)]), "has num_prompt_tokens 0: expected 1 to 1"),
    "all computed": (SchedulerOutput(new=[new("b", [1, 2], [5], computed=2)]), "comes with num_computed_tokens 2"),
    "token outside": (SchedulerOutput(new=[new("b", [100], [5])]), "has token 100: expected ids from 0 to 99"),
    "too long": (SchedulerOutput(new=[new("b", [1] * 13, [5, 6, 7, 8])]), "has 13 tokens: max_model_len is 12"),
    "null block": (SchedulerOutput(new=[new("b", [1], [0])]), "gets block 0: expected 1 to 9"),
    "no such block": (SchedulerOutput(new=[new("b", [1], [10])]), "gets block 10: expected 1 to 9"),
    "block twice": (SchedulerOutput(new=[new("b", [1], [5, 5])]), "gets block 5 twice"),
    "foreign block": (SchedulerOutput(new=[new("b", [1], [2])]), "would write block 2, which request a holds"),
    "foreign block later": (
        SchedulerOutput(new=[new("b", [1], [3])], cached=cached("a", [], [3], 4)),
        "would write block 3, which request b holds",
    ),
    "unknown": (SchedulerOutput(cached=cached("b", [], [], 0)), "is sent as cached and is not live"),
    "finished": (
        SchedulerOutput(finished_request_ids=["a"], cached=cached("a", [], [], 4)),
        "is sent as cached and is not live",
    ),
    "twice in a step": (
        SchedulerOutput(new=[new("b", [1], [3])], cached=cached("b", [], [], 0)),
        "comes twice in one step",
    ),
    "computed count": (SchedulerOutput(cached=cached("a", [], [], 3)), "has num_computed_tokens 3: expected 4"),
    "token from nowhere": (SchedulerOutput(cached=cached("a", [9], [], 4)), r"has new_token_ids \[9\]: expected \[\]"),
    "not mentioned": (SchedulerOutput(num_scheduled_tokens={"a": 1}), "is scheduled and is neither new nor cached"),
    "no tokens": (
        SchedulerOutput(cached=cached("a", [], [], 4), num_scheduled_tokens={"a": 0}),
        "is scheduled for 0 tokens: expected 1 to 2",
    ),
    "too many tokens": (
        SchedulerOutput(cached=cached("a", [], [], 4), num_scheduled_tokens={"a": 3}),
        "is scheduled for 3 tokens: expected 1 to 2",
    ),
    "too few blocks": (
        SchedulerOutput(new=[new("b", [1, 2, 3, 4, 5], [3])], num_scheduled_tokens={"b": 5}),
        "runs to token 5: its 1 blocks hold 4",
    ),
    "never computed": (
        SchedulerOutput(new=[new("b", [7, 7, 7, 7, 7], [3, 4], computed=4)], num_scheduled_tokens={"b": 1}),
        "reads block 3 at position 0 and finds the KV of something else",
    ),
    "other tokens": (
        SchedulerOutput(new=[new("b", [1, 2, 9, 4, 5], [1, 4], computed=4)], num_scheduled_tokens={"b": 1}),
        "reads block 1 at position 2 and finds the KV of something else",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_contradiction_is_refused_by_name(ledger: BatchLedger, case: str) -> None:
    """The error names the request, what came and what was expected."""
    batch, problem = CONTRADICTIONS[case]
    with pytest.raises(ProtocolError, match=rf"request [ab] {problem}"):
        ledger.apply(batch)


def test_ragged_columns_are_refused(ledger: BatchLedger) -> None:
    """Columns that are not equally long cannot be told apart."""
    with pytest.raises(ProtocolError, match=r"have lengths \[1, 0, 0, 0\]"):
        ledger.apply(SchedulerOutput(cached=CachedRequestData(request_ids=["a"])))


def test_a_token_that_was_sampled_must_come_back(ledger: BatchLedger) -> None:
    """Leaving it out, or sending another, is refused."""
    ledger.entries["a"].unheard = [8]
    with pytest.raises(ProtocolError, match=r"has new_token_ids \[\]: expected \[8\], which were sampled"):
        ledger.apply(SchedulerOutput(cached=cached("a", [], [], 4)))


def test_blocks_of_a_finished_request_are_free(ledger: BatchLedger) -> None:
    """They may be written by another one, even in the same step; an unknown id is passed over."""
    batch = SchedulerOutput(
        finished_request_ids=["a", "never-sent"], new=[new("b", [9, 9], [2])], num_scheduled_tokens={"b": 2}
    )
    ledger.apply(batch)
    assert repr(ledger) == "<BatchLedger: 1 live requests, 1/9 blocks held>"


def test_a_computed_prefix_may_be_shared(ledger: BatchLedger) -> None:
    """A request that begins alike may read a full block of another one, and survive it."""
    shares = new("b", [1, 2, 3, 4, 50], [1, 3], computed=4)
    ledger.apply(SchedulerOutput(new=[shares], num_scheduled_tokens={"b": 1}))
    ledger.apply(SchedulerOutput(finished_request_ids=["a"]))
    with pytest.raises(ProtocolError, match="would write block 1, which request b holds"):
        ledger.apply(SchedulerOutput(new=[new("c", [1], [1])]))


class PlainScheduler:
    """Runs requests in a random but consistent way: chunks, preemptions, recycled blocks."""

    def __init__(self, choose: Callable[[int, int], int]) -> None:
        self.choose = choose
        self.free = list(range(1, 10))
        self.live: dict[str, dict[str, Any]] = {}
        self.dropped: list[str] = []

    def step(self, serial: int) -> SchedulerOutput:
        """One batch."""
        finished = [name for name in self.live if self.choose(0, 9) == 0]
        for name in finished:
            self.free += self.live.pop(name)["blocks"]
        batch = SchedulerOutput(finished_request_ids=finished, new=self._arrivals(serial), cached=self._cached())
        for new_request in batch.new:
            batch.num_scheduled_tokens[new_request.request_id] = len(new_request.token_ids)
        for name in batch.cached.request_ids:
            batch.num_scheduled_tokens[name] = 1
        return batch

    def _arrivals(self, serial: int) -> list[NewRequestData]:
        if len(self.free) < 3 or self.choose(0, 2) == 0:
            return []
        tokens = [self.choose(0, 99) for _ in range(self.choose(1, 6))]
        blocks = [self.free.pop(self.choose(0, len(self.free) - 1)) for _ in range(-(-len(tokens) // 4))]
        return [new(f"r{serial}", tokens, blocks)]

    def _cached(self) -> CachedRequestData:
        columns = CachedRequestData(request_ids=[], new_token_ids=[], new_block_ids=[], num_computed_tokens=[])
        for name, request in self.live.items():
            blocks = [] if request["computed"] % 4 or not self.free else [self.free.pop()]
            if (request["computed"] % 4 == 0 and not blocks) or request["computed"] == 12:
                continue  # no room: it waits
            request["blocks"] += blocks
            columns.request_ids.append(name)
            columns.new_token_ids.append([request["last"]])
            columns.new_block_ids.append(blocks)
            columns.num_computed_tokens.append(request["computed"])
        return columns


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.randoms(use_true_random=False), st.integers(1, 25))
def test_a_consistent_scheduler_is_believed(random: Any, num_steps: int) -> None:
    """Whatever it does, tokens and blocks of ledger and scheduler stay the same."""
    ledger = BatchLedger(num_blocks=10, block_size=4, max_model_len=13, vocab_size=100)
    scheduler = PlainScheduler(random.randint)
    for serial in range(num_steps):
        for span in ledger.apply(scheduler.step(serial)):
            token = random.randint(0, 99)
            span.entry.unheard = [token]
            scheduler.live[span.entry.request_id] = {
                "blocks": list(span.entry.block_ids), "computed": span.end, "last": token
            }  # fmt: skip
    assert {name: entry.block_ids for name, entry in ledger.entries.items()} == {
        name: request["blocks"] for name, request in scheduler.live.items()
    }


def test_a_placeholder_is_what_was_sampled_last(ledger: BatchLedger) -> None:
    """It is appended itself, so that the KV of what follows is that of the token."""
    (span,) = ledger.apply(SchedulerOutput(cached=cached("a", [], [], 4), num_scheduled_tokens={"a": 2}))
    span.entry.unheard.append(42)
    (span,) = ledger.apply(SchedulerOutput(cached=cached("a", [PLACEHOLDER], [], 6), num_scheduled_tokens={"a": 1}))
    assert (span.entry.token_ids[-1], span.entry.unheard, span.is_sampled) == (42, [], True)


def test_a_placeholder_for_nothing_is_refused(ledger: BatchLedger) -> None:
    """Nothing has been sampled that it could stand for."""
    ledger.apply(SchedulerOutput(cached=cached("a", [], [], 4), num_scheduled_tokens={"a": 2}))
    with pytest.raises(ProtocolError, match=r"has new_token_ids \[-1\]: expected \[\], which were sampled"):
        ledger.apply(SchedulerOutput(cached=cached("a", [PLACEHOLDER], [], 6), num_scheduled_tokens={"a": 1}))


def test_a_rank_that_does_not_sample_takes_any_token_for_a_placeholder() -> None:
    """It never learns which; what it does know is checked as ever."""
    ledger = BatchLedger(num_blocks=10, block_size=4, max_model_len=20, vocab_size=100, samples=False)
    prompt = [1, 2, 3, 4, 5, 6]
    ledger.apply(SchedulerOutput(new=[new("a", prompt, [1, 2])], num_scheduled_tokens={"a": 6}))
    for computed in (6, 7):
        step = cached("a", [PLACEHOLDER], [], computed)
        ledger.apply(SchedulerOutput(cached=step, num_scheduled_tokens={"a": 1}))
    shared = new("b", [*prompt, 42, 43, 44], [1, 2, 3], computed=8)
    ledger.apply(SchedulerOutput(new=[shared], num_scheduled_tokens={"b": 1}))
    other = new("c", [9, *prompt[1:], 42, 43, 44], [1, 2, 4], computed=8)
    with pytest.raises(ProtocolError, match="reads block 1 at position 0"):
        ledger.apply(SchedulerOutput(new=[other], num_scheduled_tokens={"c": 1}))
