"""The dummy runner keeps the contract of a model runner, without a model."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from aexec.config import CacheConfig, ModelConfig
from aexec.errors import ConfigError, OutOfMemory, ProtocolError
from aexec.messages import (
    CachedRequestData,
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    SamplingParams,
    SchedulerOutput,
)
from aexec.model.base import ModelRunner
from aexec.model.dummy.runner import DummyRunner

PROMPT = [72, 101, 108, 108, 111]
GOLDEN = b">@Y8v;^"


def runner(settings: str = "", **cache: Any) -> ModelRunner:
    """A runner that is ready to run."""
    dummy = DummyRunner(
        ModelConfig(model=f"dummy:{settings}"), CacheConfig(**{"block_size": 4, "num_blocks": 64} | cache)
    )
    dummy.load_model()
    dummy.initialize_cache(dummy.determine_available_memory())
    dummy.compile_or_warm_up()
    return dummy


def new(name: str, first_block: int = 1, tokens: list[int] = PROMPT, prompt: int = 5, **params: Any) -> NewRequestData:
    """A request with three blocks; greedy unless told otherwise."""
    return NewRequestData(
        request_id=name,
        token_ids=tokens,
        num_prompt_tokens=prompt,
        block_ids=[first_block, first_block + 1, first_block + 2],
        num_computed_tokens=0,
        sampling=SamplingParams(**{"temperature": 0.0} | params),
        stop_token_ids=[256],
    )


def start(dummy: ModelRunner, *requests: NewRequestData, grammar: GrammarOutput | None = None) -> ModelRunnerOutput:
    """Run whole prompts and sample them."""
    counts = {request.request_id: len(request.token_ids) for request in requests}
    dummy.execute_model(SchedulerOutput(new=list(requests), num_scheduled_tokens=counts))
    return dummy.sample_tokens(grammar)


def go_on(dummy: ModelRunner, last: ModelRunnerOutput, computed: int) -> ModelRunnerOutput:
    """Run the tokens that were sampled last and sample again."""
    names = last.request_ids
    columns = CachedRequestData(
        request_ids=names,
        new_token_ids=last.sampled_token_ids,
        new_block_ids=[[] for _ in names],
        num_computed_tokens=[computed] * len(names),
    )
    dummy.execute_model(SchedulerOutput(cached=columns, num_scheduled_tokens=dict.fromkeys(names, 1)))
    return dummy.sample_tokens(None)


def text(dummy: ModelRunner, *requests: NewRequestData, num_tokens: int = 7) -> dict[str, list[int]]:
    """So many tokens of each request."""
    output = start(dummy, *requests)
    tokens = dict(zip(output.request_ids, output.sampled_token_ids, strict=True))
    for computed in range(5, 4 + num_tokens):
        output = go_on(dummy, output, computed)
        for name, token in zip(output.request_ids, output.sampled_token_ids, strict=True):
            tokens[name] = tokens[name] + token
    return tokens


def test_tokens_are_the_same_in_every_process_and_on_every_platform() -> None:
    """A known prompt has a known answer, which can be read."""
    assert bytes(text(runner(), new("a"))["a"]) == GOLDEN


def test_a_request_says_alone_what_it_says_in_company_and_after_a_preemption() -> None:
    """Its tokens depend on its own seed and history only."""
    alone = text(runner(), new("a", seed=4, temperature=1.0))["a"]
    dummy = runner()
    others = [new("b", 4), new("c", 7, temperature=1.0, seed=5), new("d", 10, tokens=[1, 2, 3, 4, 5])]
    together = text(dummy, new("a", seed=4, temperature=1.0), *others)
    assert together["a"] == alone
    assert len({tuple(tokens) for tokens in together.values()}) == 4
    again = new("a", 20, tokens=PROMPT + alone[:3], seed=4, temperature=1.0)
    dummy.execute_model(SchedulerOutput(finished_request_ids=["a"], new=[again], num_scheduled_tokens={"a": 8}))
    assert dummy.sample_tokens(None).sampled_token_ids == [[alone[3]]]


def test_another_model_seed_is_another_model() -> None:
    """The runner's own seed changes all that it says."""
    assert text(runner("seed=1"), new("a")) != text(runner(), new("a"))


def test_a_prompt_in_chunks_is_the_same_prompt() -> None:
    """Only the last chunk is sampled, and its token and prompt log-probabilities are those of the whole."""
    request = new("a", prompt_logprobs=2)
    whole = start(runner(), request)
    dummy, logprobs = runner(), []
    dummy.execute_model(SchedulerOutput(new=[request], num_scheduled_tokens={"a": 3}))
    output = dummy.sample_tokens(None)
    assert (output.request_ids, output.sampled_token_ids) == ([], [])
    logprobs += output.prompt_logprobs["a"]
    columns = CachedRequestData(request_ids=["a"], new_token_ids=[[]], new_block_ids=[[]], num_computed_tokens=[3])
    dummy.execute_model(SchedulerOutput(cached=columns, num_scheduled_tokens={"a": 2}))
    output = dummy.sample_tokens(None)
    logprobs += output.prompt_logprobs["a"]
    assert output.sampled_token_ids == whole.sampled_token_ids
    assert logprobs == whole.prompt_logprobs["a"]
    assert [entry.token_id for entry in logprobs] == PROMPT[1:]


def test_forward_passes_are_sampled_in_order() -> None:
    """Two passes may wait, and the older is sampled first."""
    dummy = runner()
    dummy.execute_model(SchedulerOutput(new=[new("a")], num_scheduled_tokens={"a": 5}))
    dummy.execute_model(SchedulerOutput(new=[new("b", 4)], num_scheduled_tokens={"b": 5}))
    assert [dummy.sample_tokens(None).request_ids for _ in range(2)] == [["a"], ["b"]]


def test_logprobs_come_for_those_who_asked() -> None:
    """The chosen token is its favourite; nobody asking means None for all."""
    output = start(runner(), new("a", logprobs=1), new("b", 4))
    assert output.logprobs is not None
    entry, nothing = output.logprobs
    assert nothing is None
    assert entry is not None
    assert (entry.token_id, entry.rank, list(entry.top)) == (output.sampled_token_ids[0][0], 1, [entry.token_id])
    assert start(runner(), new("a")).logprobs is None


def allow(*tokens: int) -> np.ndarray:
    """One row of a bitmask for 512 tokens."""
    bits = np.zeros((1, 512), dtype=np.bool_)
    bits[0, list(tokens)] = True
    return np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32)


def test_a_grammar_is_obeyed() -> None:
    """One allowed token is the token; none is an error of that request alone."""
    grammar = GrammarOutput(request_ids=["a", "b"], bitmask=np.concatenate([allow(300), allow()]))
    output = start(runner(), new("a"), new("b", 4), new("c", 7), grammar=grammar)
    assert output.request_ids == ["a", "c"]
    assert output.sampled_token_ids[0] == [300]
    assert output.errors == {"b": "no token may come at position 5: grammar and min_tokens forbid all of them"}
    assert output.refused == {"b"}


def test_a_request_does_not_end_before_min_tokens() -> None:
    """A dummy that always wants to end says something else until it may."""
    dummy = runner("eos_probability=1")
    tokens = text(dummy, new("a", min_tokens=3), num_tokens=4)["a"]
    assert [token == 256 for token in tokens] == [False, False, False, True]


def test_errors_come_on_demand() -> None:
    """A poisoned prompt fails alone; a crashing one raises; a queued error is raised once and runs nothing."""
    dummy = runner("poison_token_id=1,crash_token_id=2")
    output = start(dummy, new("a", tokens=[1, 3], prompt=2), new("b", 4))
    assert output.errors == {"a": "the prompt holds token 1, which poisons the dummy"}
    assert output.request_ids == ["b"]
    with pytest.raises(RuntimeError, match="the prompt of c holds token 2, which crashes the dummy"):
        start(dummy, new("c", 7, tokens=[2], prompt=1))
    assert isinstance(dummy, DummyRunner)
    dummy.fail_next(OSError("the device is gone"))
    with pytest.raises(OSError, match="the device is gone"):
        start(dummy, new("d", 10))
    assert start(dummy, new("d", 10)).request_ids == ["d"]


def test_a_forward_pass_takes_as_long_as_told() -> None:
    """It blocks its thread, as a device does."""
    dummy = runner("forward_seconds=0.03")
    began = time.perf_counter()
    start(dummy, new("a"))
    assert 0.03 <= time.perf_counter() - began < 5.0


def test_calls_out_of_order_are_refused() -> None:
    """No forward pass before the cache, no sampling without a forward pass, no heap of unsampled ones."""
    with pytest.raises(ProtocolError, match="execute_model came before initialize_cache"):
        DummyRunner().execute_model(SchedulerOutput())
    dummy = runner()
    dummy.execute_model(SchedulerOutput())  # without tokens: nothing to sample
    with pytest.raises(ProtocolError, match="no forward pass waits to be sampled"):
        dummy.sample_tokens(None)
    for serial in range(64):
        dummy.execute_model(just_one(serial))
    with pytest.raises(ProtocolError, match="64 forward passes wait for sample_tokens"):
        dummy.execute_model(just_one(64))


def just_one(serial: int) -> SchedulerOutput:
    """A batch of one request with one token, in place of the one before."""
    requests = [new("b", 4, tokens=[serial], prompt=1)]
    return SchedulerOutput(finished_request_ids=["b"], new=requests, num_scheduled_tokens={"b": 1})


def test_a_scheduler_that_contradicts_itself_is_caught() -> None:
    """The runner passes every batch through the ledger."""
    with pytest.raises(ProtocolError, match="request b would write block 3, which request a holds"):
        start(runner(), new("a"), new("b", 3))


def test_a_model_name_of_another_model_is_refused() -> None:
    """The dummy does not stand in for a model silently."""
    with pytest.raises(ConfigError, match="the model is 'smollm2'"):
        DummyRunner(ModelConfig(model="smollm2"))


def test_the_cache_holds_what_the_bytes_hold() -> None:
    """A budget gives its blocks, and one that holds less than two is out of memory."""
    dummy = runner(num_blocks=None, memory_bytes=10 * 4 * 8 + 5)
    assert (dummy.info().num_blocks, dummy.info().block_bytes) == (10, 32)
    with pytest.raises(OutOfMemory, match="the smallest KV cache, two blocks, needs"):
        runner(num_blocks=None, memory_bytes=40)


def test_it_can_be_looked_at() -> None:
    """Facts, statistics and repr say what it is and what it did."""
    dummy = DummyRunner(ModelConfig(model="dummy", max_model_len=100))
    assert (dummy.info().num_blocks, dummy.info().max_model_len, dummy.info().vocab_size) == (0, 100, 512)
    dummy.initialize_cache(dummy.determine_available_memory())
    assert dummy.info().num_blocks == 4096
    start(dummy, new("a"), new("b", 4))
    assert tuple(dummy.statistics()) == (1, 10, 2, 2, 0)
    assert repr(dummy) == "<DummyRunner: vocabulary of 512, 1 steps, 10 tokens, 0 to sample>"


def test_it_needs_no_torch() -> None:
    """A fresh interpreter imports the dummy without torch or transformers."""
    code = "import sys, aexec.model.dummy.runner; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
