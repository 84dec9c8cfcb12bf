"""From logits to tokens: the same in any company, and one bad request harms no other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aexec.errors import ProtocolError
from aexec.messages import GrammarOutput, ModelRunnerOutput, SamplingParams
from aexec.model.sampling.noise import exponentials
from aexec.model.sampling.race import GROUP_SIZE
from aexec.model.sampling.sampler import Sampler
from aexec.model.sampling.state import SamplingState

VOCAB = 600
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.none(),
    temperature=st.one_of(st.just(0.0), st.floats(0.1, 3.0)),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.5),
    repetition_penalty=st.floats(0.5, 2.0),
    frequency_penalty=st.floats(-1.0, 1.0),
    min_tokens=st.integers(0, 6),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5.0, 5.0), max_size=3),
    seed=st.integers(-(2**63), 2**63 - 1),
    logprobs=st.one_of(st.none(), st.integers(0, 3)),
)
HISTORY = st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=10)


def random_logits(num_rows: int, seed: int = 0) -> Tensor:
    """Normal logits of the spread that a language model has."""
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def request(name: str, **params: Any) -> SamplingState:
    """A request with a prompt of two tokens and an output of one; greedy unless told otherwise."""
    params = {"temperature": 0.0, "max_tokens": None} | params
    return SamplingState(name, SamplingParams(**params), [1, 2, 3], 2, (0, 7))


def tokens_of(output: ModelRunnerOutput) -> dict[str, int]:
    """Tokens by request id."""
    return {name: token for name, [token] in zip(output.request_ids, output.sampled_token_ids, strict=True)}


def naive_choice(logits: Tensor, state: SamplingState) -> int:
    """The documented steps for one request without extras, in float64, on whole sorted rows."""
    params, scores = state.params, logits.double()
    if params.is_greedy:
        return int(scores.argmax())
    scores = (scores - scores.max()) / params.temperature
    order = scores.argsort(descending=True)
    kept = order[: params.top_k or VOCAB]
    shares = scores[kept].softmax(0)
    kept = kept[(shares.cumsum(0) - shares) < params.top_p] if params.top_p < 1.0 else kept
    kept = kept[scores[kept].exp() >= params.min_p]
    weights = torch.zeros(VOCAB, dtype=torch.float64).index_copy_(0, kept, scores[kept].exp())
    assert params.seed is not None
    noise = torch.from_numpy(exponentials([params.seed], [state.position], 2 * GROUP_SIZE)[0]).double()
    groups = [weights[start : start + GROUP_SIZE] for start in range(0, VOCAB, GROUP_SIZE)]
    group = int(torch.stack([(part.sum() / noise[GROUP_SIZE + place]) for place, part in enumerate(groups)]).argmax())
    return group * GROUP_SIZE + int((groups[group] / noise[: len(groups[group])]).argmax())


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.one_of(st.just(0.0), st.floats(0.2, 3.0)), st.integers(0, 50), st.floats(0.05, 1.0), st.floats(0, 0.5)
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 2**31),
)
def test_tokens_are_those_of_the_documented_steps(rows: list[tuple[float, int, float, float]], seed: int) -> None:
    """A batch of all kinds chooses what a plain loop in double precision chooses for each row."""
    logits = random_logits(len(rows), seed)
    states = [
        request(f"r{row}", temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed + row)
        for row, (temperature, top_k, top_p, min_p) in enumerate(rows)
    ]
    expected = {state.request_id: naive_choice(logits[row], state) for row, state in enumerate(states)}
    assert tokens_of(Sampler(VOCAB).sample(logits, states)) == expected


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.lists(st.tuples(PARAMS, HISTORY), min_size=2, max_size=7), st.randoms(use_true_random=False))
def test_a_request_gets_alone_what_it_gets_in_any_batch(
    rows: list[tuple[SamplingParams, list[int]]], random: Any
) -> None:
    """Token, log-probabilities and error of a row do not change with the company or the order."""
    logits = random_logits(len(rows), seed=len(rows))

    def fresh(row: int) -> SamplingState:  # as after a preemption: made anew from the tokens
        return SamplingState(f"r{row}", rows[row][0], list(rows[row][1]), 1, (0, 7))

    def sample(order: list[int]) -> dict[str, Any]:
        output = Sampler(VOCAB).sample(logits[order].clone(), [fresh(row) for row in order])
        logprobs = output.logprobs or [None] * len(output.request_ids)
        chosen = zip(output.request_ids, output.sampled_token_ids, logprobs, strict=True)
        return {name: (tokens, entry) for name, tokens, entry in chosen}

    order = list(range(len(rows)))
    together = sample(order)
    random.shuffle(order)
    assert sample(order) == together
    assert {name: value for row in order for name, value in sample([row]).items()} == together


def test_penalties_follow_the_output_from_step_to_step() -> None:
    """A state that was carried through ten steps samples as one that is made anew at each."""
    params = SamplingParams(
        temperature=0.8, seed=5, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7
    )
    carried, sampler = SamplingState("a", params, [1, 2, 3], 3), Sampler(VOCAB)
    for step in range(10):
        anew = SamplingState("a", params, list(carried.token_ids), 3)
        logits = random_logits(1, seed=step % 2)
        expected = sampler.sample(logits.clone(), [anew])
        assert sampler.sample(logits, [carried]) == expected
        carried.token_ids.append(tokens_of(expected)["a"])


@pytest.mark.parametrize("extra", [{}, {"logit_bias": {5: -1.0}}])
def test_greedy_takes_the_lowest_id_among_equals(extra: dict[str, Any]) -> None:
    """Ties are broken alike with extras and without."""
    logits = torch.zeros(1, VOCAB)
    logits[0, [17, 300, 599]] = 4.0
    assert tokens_of(Sampler(VOCAB).sample(logits, [request("a", **extra)])) == {"a": 17}


class Operations(TorchDispatchMode):
    """Records the operations that read or write as many numbers as the logits hold."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.names = size, list[str]()

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(value, Tensor) and value.numel() >= self.size for value in args):
            self.names.append(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


def test_a_plain_greedy_batch_costs_one_argmax() -> None:
    """Nothing else walks over the logits, and they are left as they were."""
    logits = random_logits(4)
    before = logits.clone()
    with Operations(logits.numel()) as operations:
        Sampler(VOCAB).sample(logits, [request(name) for name in "abcd"])
    assert [name for name in operations.names if name != "gather"] == ["argmax"]  # gather reads one per row
    assert logits.equal(before)


def test_only_rows_that_ask_for_top_p_are_sorted() -> None:
    """One top-p request among greedy and plainly sampled ones sorts one row."""
    logits = random_logits(6)
    states = [request("p", temperature=1.0, top_p=0.9, seed=1)]
    states += [request(f"t{row}", temperature=1.0, seed=1) for row in range(2)] + [
        request(f"g{row}") for row in range(3)
    ]
    with Operations(VOCAB) as operations:
        Sampler(VOCAB).sample(logits, states)
    with Operations(2 * VOCAB) as large:
        Sampler(VOCAB).sample(random_logits(6), states)
    assert operations.names.count("topk") == 1
    assert "topk" not in large.names
    assert "sort" not in operations.names


def break_row(value: float) -> Callable[[Tensor], None]:
    """Writes a value into one logit of row 1."""

    def write(logits: Tensor) -> None:
        logits[1, 40] = value

    return write


def silence_row(logits: Tensor) -> None:
    """Forbids every token of row 1."""
    logits[1] = -math.inf


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3, "top_p": 0.5}, {"logit_bias": {40: 1.0}}])
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (break_row(math.nan), "hold NaN at position 3"),
        (break_row(math.inf), "hold +inf at position 3"),
        (silence_row, "are -inf for every token at position 3"),
    ],
)
def test_logits_that_are_not_numbers_fail_their_request_only(
    params: dict[str, Any], damage: Callable[[Tensor], None], text: str
) -> None:
    """The error names what was found and what to try; the neighbours get their tokens."""
    states = [request("a"), request("b", **params), request("c", temperature=1.0, seed=9)]
    expected = tokens_of(Sampler(VOCAB).sample(random_logits(3), states))
    logits = random_logits(3)
    damage(logits)
    output = Sampler(VOCAB).sample(logits, states)
    assert list(output.errors) == ["b"]
    assert f"the model's logits {text}: its weights are damaged" in output.errors["b"]
    assert tokens_of(output) == {name: expected[name] for name in "ac"}


def mask(*rows: set[int]) -> np.ndarray:
    """A bitmask that allows these tokens."""
    bits = np.zeros((len(rows), 608), dtype=np.bool_)
    for line, allowed in enumerate(rows):
        bits[line, list(allowed)] = True
    return np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_grammar_is_obeyed_and_can_leave_nothing(temperature: float) -> None:
    """The chosen token is an allowed one; when grammar and min_tokens allow none, the error says so."""
    states = [
        request("free", temperature=temperature, seed=1),
        request("tight", temperature=temperature, seed=1),
        request("stuck", temperature=temperature, seed=1, min_tokens=4),
        request("none", temperature=temperature, seed=1),
    ]
    grammar = GrammarOutput(request_ids=["none", "stuck", "gone", "tight"], bitmask=mask(set(), {0, 7}, {1}, {88, 599}))
    output = Sampler(VOCAB).sample(random_logits(4), states, grammar)
    assert tokens_of(output).keys() == {"free", "tight"}
    assert tokens_of(output)["tight"] in {88, 599}
    assert output.errors == {
        "stuck": "no token may come at position 3: the grammar and min_tokens 4 forbid all of them",
        "none": "no token may come at position 3: the grammar forbids all of them",
    }
    assert output.refused == {"stuck", "none"}


def test_a_grammar_that_forbids_everything_is_noticed_without_other_extras() -> None:
    """The mask alone is reason enough to look at the logits again."""
    grammar = GrammarOutput(request_ids=["a"], bitmask=mask(set()))
    output = Sampler(VOCAB).sample(random_logits(2), [request("a"), request("b")], grammar)
    assert output.errors == {"a": "no token may come at position 3: the grammar forbids all of them"}


def test_a_nan_that_the_grammar_hides_is_still_an_error() -> None:
    """A model that writes NaN is broken, whichever tokens are allowed."""
    logits = random_logits(1)
    logits[0, 5] = math.nan
    output = Sampler(VOCAB).sample(logits, [request("a")], GrammarOutput(request_ids=["a"], bitmask=mask({6})))
    assert "hold NaN" in output.errors["a"]
    assert not output.refused


def test_a_bias_outside_of_the_vocabulary_fails_its_request_only() -> None:
    """The error names the id and the range."""
    output = Sampler(VOCAB).sample(random_logits(2), [request("a", logit_bias={600: 1.0}), request("b")])
    assert output.errors == {"a": "logit_bias names token 600: expected ids from 0 to 599"}
    assert output.refused == {"a"}
    assert output.request_ids == ["b"]


@pytest.mark.parametrize("penalty", [1e-40, 1e-300])
def test_a_penalty_that_overflows_fails_its_request_only(penalty: float) -> None:
    """Dividing by next to nothing makes infinities of finite logits."""
    states = [request("a", repetition_penalty=penalty), request("b")]
    output = Sampler(VOCAB).sample(random_logits(2).abs(), states)
    assert output.errors == {"a": f"repetition_penalty {penalty:g} makes logits that are not finite at position 3"}
    assert output.request_ids == ["b"]


def test_a_penalty_that_forbids_everything_fails_its_request_only() -> None:
    """Multiplying negative logits by a huge number leaves no token, when all were there before."""
    state = SamplingState("a", SamplingParams(temperature=0.0, repetition_penalty=1e300), list(range(VOCAB)), VOCAB)
    output = Sampler(VOCAB).sample(-random_logits(1).abs() - 1, [state])
    assert output.errors == {"a": "no token may come at position 600: repetition_penalty 1e+300 forbids all of them"}


def test_logprobs_are_the_models_own() -> None:
    """Bias, grammar and temperature choose the token, and its log-probability is that of the raw logits."""
    logits = random_logits(2)
    expected = logits[0].log_softmax(0)
    states = [request("a", logit_bias={400: 100.0}, temperature=0.5, seed=1, logprobs=2), request("b")]
    output = Sampler(VOCAB).sample(logits, states)
    assert output.logprobs is not None
    entry, nothing = output.logprobs
    assert nothing is None
    assert entry is not None
    assert entry.token_id == 400
    assert entry.logprob == pytest.approx(expected[400].item(), abs=1e-5)
    assert list(entry.top) == expected.topk(2).indices.tolist()


def test_logprobs_keep_in_step_with_requests_when_one_fails() -> None:
    """A request without a token has no entry either."""
    logits = random_logits(3)
    logits[0, 0] = math.nan
    output = Sampler(VOCAB).sample(logits, [request(name, logprobs=0) for name in "abc"])
    assert output.request_ids == ["b", "c"]
    assert [entry.token_id for entry in output.logprobs or () if entry] == [
        token for [token] in output.sampled_token_ids
    ]


def test_no_requests_need_no_logits() -> None:
    """A step whose requests are all in the middle of their prompt samples nothing."""
    assert Sampler(VOCAB).sample(torch.zeros(0, VOCAB), []) == ModelRunnerOutput()


@pytest.mark.parametrize(
    ("logits", "found"),
    [
        (torch.zeros(2, VOCAB), r"torch.float32 \[2, 600\]"),
        (torch.zeros(1, 5), r"torch.float32 \[1, 5\]"),
        (torch.zeros(1, VOCAB, dtype=torch.bfloat16), r"torch.bfloat16 \[1, 600\]"),
    ],
)
def test_logits_of_another_shape_or_type_are_refused(logits: Tensor, found: str) -> None:
    """The error names what came and what was expected."""
    with pytest.raises(ProtocolError, match=rf"logits are {found}: expected float32 \[1, 600\]"):
        Sampler(VOCAB).sample(logits, [request("a")])


def test_a_sampler_can_be_printed() -> None:
    """Its repr and its statistics count rows by what happened to them."""
    sampler = Sampler(VOCAB)
    logits = random_logits(3)
    logits[2, 0] = math.nan
    sampler.sample(logits, [request("a"), request("b", temperature=1.0, seed=0), request("c")])
    assert tuple(sampler.statistics()) == (2, 1, 1)
    assert repr(sampler) == "<Sampler: vocabulary of 600, 2 greedy, 1 sampled, 1 failed rows>"
