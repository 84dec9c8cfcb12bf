"""The torch runner as its worker sees it: deltas in, tokens out, nobody harmed by his neighbour."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch

from aexec.config import CacheConfig, ModelConfig
from aexec.errors import OutOfMemory, ProtocolError, UnsupportedModel
from aexec.messages import ModelRunnerOutput, SamplingParams, SchedulerOutput
from aexec.messages.batch import PLACEHOLDER
from aexec.model.base import ModelRunner
from aexec.model.sampling.state import SamplingState
from aexec.model.transformer import runner as torch_runner
from aexec.model.transformer.hooks import Stage
from aexec.model.transformer.runner import TorchRunner

PROMPTS = {"a": [11, 12, 13], "b": list(range(20, 55)), "c": [400]}


@pytest.fixture(scope="module")
def llama(tiny_model, ready_runner):
    """One runner for all tests that leave it as they found it."""
    return ready_runner(tiny_model("llama_gqa"), block_size=8)


@pytest.fixture(autouse=True)
def forgets_everything(request):
    """The shared runner knows no request after a test."""
    yield
    if "llama" in request.fixturenames:
        runner = request.getfixturevalue("llama")
        runner._requests._requests.clear()
        runner._pending.clear()


def alone(runner, make, name: str, max_tokens: int = 8, **sampling) -> list[int]:
    scheduler = make(block_size=8)
    scheduler.add(name, PROMPTS[name], max_tokens, **sampling)
    return scheduler.run(runner)[name]


def test_it_is_a_model_runner(llama) -> None:
    """It has all methods of the protocol."""
    methods = [name for name in vars(ModelRunner) if not name.startswith("_")]
    assert methods
    assert all(hasattr(llama, name) for name in methods)


def test_info_tells_what_it_holds(llama) -> None:
    """Sizes of the model, of the cache, and peak memory of the process."""
    info = llama.info()
    assert (info.architecture, info.vocab_size, info.max_model_len) == ("LlamaForCausalLM", 512, 512)
    assert (info.block_size, info.num_blocks, info.block_bytes) == (8, 64, 8 * 4 * 2 * 2 * 16 * 4)
    assert (info.dtype, info.device) == ("float32", "cpu")
    assert info.num_parameters == 213_568
    assert info.peak_memory_bytes > 10**7
    assert "LlamaForCausalLM on cpu, <KVCache: 64 blocks" in repr(llama)


def test_company_changes_no_token(llama, toy_scheduler) -> None:
    """Each request gets in a mixed batch what it gets alone."""
    expected = {name: alone(llama, toy_scheduler, name) for name in PROMPTS}
    scheduler = toy_scheduler(block_size=8, budget=12)
    for name, prompt in PROMPTS.items():
        scheduler.add(name, prompt, 8)
    assert scheduler.run(llama) == expected
    assert scheduler.num_mixed_steps


def test_a_seeded_request_is_the_same_in_any_company(llama, toy_scheduler) -> None:
    """Sampled tokens too: they depend on seed, position and logits."""
    expected = alone(llama, toy_scheduler, "b", temperature=1.0, seed=7)
    scheduler = toy_scheduler(block_size=8, budget=12)
    scheduler.add("a", PROMPTS["a"], 8)
    scheduler.add("b", PROMPTS["b"], 8, temperature=1.0, seed=7)
    scheduler.add("c", PROMPTS["c"], 8, temperature=2.0, seed=8)
    assert scheduler.run(llama)["b"] == expected
    assert expected != alone(llama, toy_scheduler, "b", temperature=1.0, seed=9)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}])
def test_a_preemption_changes_no_token(llama, toy_scheduler, sampling) -> None:
    """Dropped, sent again with all its tokens and other blocks, it goes on where it was."""
    expected = alone(llama, toy_scheduler, "b", **sampling)
    scheduler = toy_scheduler(block_size=8, budget=16)
    scheduler.add("b", PROMPTS["b"], 8, **sampling)
    for _ in range(5):
        llama.execute_model(scheduler.schedule())
        scheduler.commit(llama.sample_tokens(None))
    assert 0 < len(scheduler.running["b"].output) < 8
    scheduler.preempt("b")
    scheduler.add("c", PROMPTS["c"], 8)  # takes some of its blocks
    assert scheduler.run(llama)["b"] == expected


def test_several_steps_may_wait_to_be_sampled(llama, toy_scheduler) -> None:
    """They come out in the order in which they went in."""
    first, second = toy_scheduler(block_size=8), toy_scheduler(block_size=8)
    second.free = first.free[:20]
    first.free = first.free[20:]
    first.add("a", PROMPTS["a"], 1)
    second.add("c", PROMPTS["c"], 1)
    llama.execute_model(first.schedule())
    llama.execute_model(second.schedule())
    assert llama.statistics().pending == 2
    assert llama.sample_tokens(None).request_ids == ["a"]
    assert llama.sample_tokens(None).request_ids == ["c"]


def test_there_is_an_end_to_steps_that_wait(llama, toy_scheduler, monkeypatch) -> None:
    """The queue has a bound; past it the driver is told to sample."""
    monkeypatch.setattr(torch_runner, "_MOST_PENDING", 1)
    scheduler = toy_scheduler(block_size=8)
    scheduler.add("a", PROMPTS["a"])
    llama.execute_model(scheduler.schedule())
    with pytest.raises(ProtocolError, match=r"1 forward passes wait for sample_tokens"):
        llama.execute_model(SchedulerOutput())


def test_an_incomplete_prompt_is_not_sampled(llama, toy_scheduler) -> None:
    """A chunk that ends before the last token gives no token, and its step is sampled like any other."""
    scheduler = toy_scheduler(block_size=8, budget=10)
    scheduler.add("b", PROMPTS["b"])
    llama.execute_model(scheduler.schedule())
    output = llama.sample_tokens(None)
    assert (output.request_ids, output.sampled_token_ids, output.errors) == ([], [], {})


def test_a_batch_without_tokens_only_updates(llama, toy_scheduler) -> None:
    """Finished requests are forgotten, and nothing waits to be sampled."""
    alone(llama, toy_scheduler, "a")
    assert (llama.statistics().live_requests, llama.statistics().pending) == (0, 0)
    with pytest.raises(ProtocolError, match=r"no forward pass waits to be sampled"):
        llama.sample_tokens(None)


@pytest.mark.parametrize("budget", [512, 7])
def test_prompt_logprobs_are_the_models_own(llama, toy_scheduler, budget) -> None:
    """One entry for each token of the prompt but the first, however the prompt was cut."""
    scheduler = toy_scheduler(block_size=8, budget=budget)
    scheduler.add("a", PROMPTS["a"], 4)
    scheduler.add("b", PROMPTS["b"], 4, prompt_logprobs=2, logprobs=1)
    scheduler.run(llama)
    assert list(scheduler.prompt_logprobs) == ["b"]
    entries = scheduler.prompt_logprobs["b"]
    assert [entry.token_id for entry in entries] == PROMPTS["b"][1:]
    expected = plain_logprobs(llama, PROMPTS["b"])
    for place, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(expected[place, entry.token_id].item(), abs=1e-4)
        assert list(entry.top) == expected[place].topk(2).indices.tolist()
        assert entry.rank == int((expected[place] > expected[place, entry.token_id]).sum()) + 1


def plain_logprobs(runner, prompt: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    from aexec.model.transformer.hooks import silent

    with silent():
        model = AutoModelForCausalLM.from_pretrained(runner._config.model)
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0].log_softmax(-1)


def test_logits_that_are_no_numbers_fail_their_request_only(tiny_model, ready_runner, toy_scheduler) -> None:
    """One poisoned embedding: its request gets an error, its neighbours their tokens, and so does who reuses its blocks."""
    runner = ready_runner(tiny_model("llama", seed=1), block_size=8, num_blocks=16)
    expected = {name: alone(runner, toy_scheduler, name) for name in ("a", "b")}
    with torch.no_grad():
        runner._store.model.module.get_input_embeddings().weight[499] = math.nan
    scheduler = toy_scheduler(block_size=8, num_blocks=16)
    scheduler.add("a", PROMPTS["a"], 8)
    scheduler.add("bad", [5, 499, 6, *range(100, 140)], 8)
    outputs = scheduler.run(runner)
    assert list(scheduler.errors) == ["bad"]
    assert "logits hold NaN at position 43" in scheduler.errors["bad"]
    assert outputs["a"] == expected["a"]
    poisoned = set(scheduler.done["bad"].block_ids)
    scheduler.add("b", PROMPTS["b"], 8)
    assert scheduler.run(runner)["b"] == expected["b"]
    assert poisoned & set(scheduler.done["b"].block_ids)


def test_two_runners_in_one_process_do_not_meet(tiny_model, ready_runner, toy_scheduler, llama) -> None:
    """Steps of one between the steps of the other change nothing."""
    other = ready_runner(tiny_model("llama_gqa", seed=9), block_size=8)
    expected = [alone(runner, toy_scheduler, "b") for runner in (llama, other)]
    assert expected[0] != expected[1]
    schedulers = [toy_scheduler(block_size=8, budget=16) for _ in range(2)]
    for scheduler in schedulers:
        scheduler.add("b", PROMPTS["b"], 8)
    while any(scheduler.running for scheduler in schedulers):
        for scheduler, runner in zip(schedulers, (llama, other), strict=True):
            runner.execute_model(scheduler.schedule())
        for scheduler, runner in zip(schedulers, (llama, other), strict=True):
            if scheduler.running:
                scheduler.commit(runner.sample_tokens(None))
    assert [scheduler.done["b"].output for scheduler in schedulers] == expected


def test_the_cache_follows_the_budget(tiny_model) -> None:
    """Bytes become blocks; too few are refused with need and have."""
    runner = TorchRunner(
        ModelConfig(model=str(tiny_model("llama_gqa"))), CacheConfig(block_size=8, memory_bytes=100_000)
    )
    runner.load_model()
    assert runner.info().num_blocks == 0
    runner.initialize_cache(runner.determine_available_memory())
    assert runner.info().num_blocks == 100_000 // runner.info().block_bytes == 12
    with pytest.raises(OutOfMemory, match=r"the least KV cache"):
        runner.initialize_cache(1000)


def test_the_ranks_of_a_host_share_what_is_free(tiny_model, monkeypatch) -> None:
    """Each takes a quarter of its share, so that all of them together take what one alone would."""
    monkeypatch.setattr(torch_runner, "free_bytes", lambda _device: 8_000_000)
    found = []
    for stage, num_sharers in ((Stage(), 0), (Stage(0, 2), 0), (Stage(0, 2), 4)):  # the last: two replicas
        model = ModelConfig(model=str(tiny_model("llama_gqa")))
        runner = TorchRunner(model, CacheConfig(), stage=stage, num_sharers=num_sharers)
        runner.load_model()
        found.append(runner.determine_available_memory())
    assert found == [2_000_000, 1_000_000, 500_000]


def test_steps_in_the_wrong_order_are_refused(tiny_model) -> None:
    """Before it is loaded, and before it has a cache."""
    runner = TorchRunner(ModelConfig(model=str(tiny_model("llama_gqa"))), CacheConfig())
    with pytest.raises(ProtocolError, match=r"before load_model"):
        runner.info()
    runner.load_model()
    with pytest.raises(ProtocolError, match=r"before initialize_cache"):
        runner.compile_or_warm_up()


def test_warming_up_leaves_the_null_block_as_it_was(tiny_model, ready_runner) -> None:
    """It is where the warm-up writes, and padding reads it."""
    runner = ready_runner(tiny_model("llama_gqa"), block_size=8)
    assert all(bool(keys[0].eq(0).all()) for keys in runner._store.cache.keys.values())


def test_a_model_that_attends_past_the_cache_is_refused(tiny_model, ready_runner) -> None:
    """It would answer, and wrongly: each step would see its own tokens only."""
    runner = ready_runner(tiny_model("llama_gqa"))
    runner._store.model.module.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM attends in a way of its own, past our KV cache"):
        runner.compile_or_warm_up()


class Blind:
    """Tells the runner no token that it has sampled itself."""

    def __init__(self, runner):
        self.runner, self.num_placeholders = runner, 0

    def execute_model(self, batch):
        columns = batch.cached
        news = [[PLACEHOLDER] * len(tokens) for tokens in columns.new_token_ids]
        self.num_placeholders += sum(map(len, news))
        self.runner.execute_model(
            msgspec.structs.replace(batch, cached=msgspec.structs.replace(columns, new_token_ids=news))
        )

    def sample_tokens(self, grammar):
        return self.runner.sample_tokens(grammar)


def test_a_placeholder_is_the_token_that_was_sampled_last(llama, toy_scheduler) -> None:
    """A step may go on with tokens that only the runner knows; the text is the same."""
    expected = {name: alone(llama, toy_scheduler, name, temperature=1.0, seed=5) for name in PROMPTS}
    scheduler, blind = toy_scheduler(block_size=8, budget=100), Blind(llama)
    for name, prompt in PROMPTS.items():
        scheduler.add(name, prompt, 8, temperature=1.0, seed=5)
    assert scheduler.run(blind) == expected
    assert blind.num_placeholders == 3 * 7


def test_a_request_that_could_not_be_sampled_spoils_no_step_behind(llama, toy_scheduler) -> None:
    """Its placeholder is some token: nobody will look at what comes of it."""
    states = [SamplingState(name, SamplingParams(temperature=0.0), [1], 1) for name in "ab"]
    torch_runner._remember(states, ModelRunnerOutput(request_ids=["b"], sampled_token_ids=[[7]], errors={"a": "NaN"}))
    assert [state.sampled for state in states] == [0, 7]
