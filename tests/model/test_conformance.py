"""Every architecture that the loader allows, against transformers' own generate.

Steps are forced to be awkward: a budget of 16 tokens cuts prompts of up to 40 tokens into
chunks that do not end where blocks of 8 do, and mixes them with decodes of the others.

Tolerance of float32 logits: 5e-5 absolute at |logit| of 4 to 11; seen: 1.8e-5. They cannot
be equal to the bit: oneDNN and BLAS sum in different orders. In bfloat16 0.25; seen: 0.14, where
transformers itself is 0.28 away from its float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from aexec.model.transformer.hooks import model_class_name, silent
from aexec.model.transformer.loader import SUPPORTED
from aexec.testing.tiny_models import TINY_ARCHITECTURES

NUM_NEW = 12
TOLERANCE = {"float32": 5e-5, "bfloat16": 0.25}
generator = torch.Generator().manual_seed(5)
PROMPTS = {f"r{n}": torch.randint(3, 512, (n,), generator=generator).tolist() for n in (1, 5, 23, 40)}


def reference(directory: Any, dtype: torch.dtype = torch.float32) -> Any:
    with silent():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    model.generation_config.eos_token_id = None  # min_new_tokens would forbid the end token instead of ignoring it
    return model


@torch.inference_mode()
def generated(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with silent():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def expected_logits(model: Any, prompt: list[int], output: list[int]) -> torch.Tensor:
    return model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()


class Stages:
    """Runners of all pipeline stages as one; records the logits before they are spent."""

    def __init__(self, runners: list[Any]) -> None:
        self.runners = runners
        self.logits: dict[str, list[torch.Tensor]] = {name: [] for name in PROMPTS}

    def execute_model(self, batch: Any) -> None:
        hidden = None
        for runner in self.runners:
            hidden = runner.execute_stage(batch, hidden)

    def sample_tokens(self, grammar: Any) -> Any:
        pending = self.runners[-1]._pending[0]
        for row, state in enumerate(pending.sampled):
            self.logits[state.request_id].append(pending.logits[row].clone())
        return self.runners[-1].sample_tokens(grammar)


def run(runners: list[Any], scheduler: Any) -> tuple[dict[str, list[int]], dict[str, torch.Tensor]]:
    stages = Stages(runners)
    for name, prompt in PROMPTS.items():
        scheduler.add(name, prompt, NUM_NEW, ignore_eos=True)
    outputs = scheduler.run(stages)
    assert scheduler.num_mixed_steps > 2
    return outputs, {name: torch.stack(rows) for name, rows in stages.logits.items()}


@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_chunked_and_mixed_steps_say_what_generate_says(name, tiny_model, ready_runner, toy_scheduler) -> None:
    """Each request's tokens are those of generate for its prompt alone, its logits within the tolerance."""
    directory = tiny_model(name)
    runner = ready_runner(directory, block_size=8)
    outputs, logits = run([runner], toy_scheduler(block_size=8, budget=16))
    model = reference(directory)
    assert outputs == {request: generated(model, prompt) for request, prompt in PROMPTS.items()}
    for request, prompt in PROMPTS.items():
        expected = expected_logits(model, prompt, outputs[request])
        torch.testing.assert_close(logits[request], expected, rtol=0, atol=TOLERANCE["float32"])
    assert len({token for output in outputs.values() for token in output}) >= 4, (
        "a model that says one word proves little"
    )


@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_two_pipeline_stages_say_what_one_says(name, tiny_model, ready_runner, toy_scheduler) -> None:
    """A model cut in two, hidden states handed on, gives the tokens and the very logits of the whole one."""
    directory = tiny_model(name)
    runner = ready_runner(directory, block_size=8)
    whole, whole_logits = run([runner], toy_scheduler(block_size=8, budget=16))
    cut = [ready_runner(directory, block_size=8, pp_rank=rank, pp_size=2) for rank in range(2)]
    outputs, logits = run(cut, toy_scheduler(block_size=8, budget=16))
    assert outputs == whole
    for request in PROMPTS:
        torch.testing.assert_close(logits[request], whole_logits[request], rtol=0, atol=1e-5)
    assert max(stage.info().num_parameters for stage in cut) < runner.info().num_parameters


@pytest.mark.parametrize("name", ["llama_gqa", "gemma2", "gpt2"])
def test_bfloat16_stays_near_the_reference(name, tiny_model, ready_runner, toy_scheduler) -> None:
    """In bfloat16 the logits are within rounding of transformers' own bfloat16, along the same tokens."""
    directory = tiny_model(name)
    outputs, logits = run(
        [ready_runner(directory, block_size=8, dtype="bfloat16")], toy_scheduler(block_size=8, budget=16)
    )
    model = reference(directory, torch.bfloat16)
    for request, prompt in PROMPTS.items():
        expected = expected_logits(model, prompt, outputs[request])
        torch.testing.assert_close(logits[request], expected, rtol=0, atol=TOLERANCE["bfloat16"])


def test_the_loader_allows_what_is_tested_here() -> None:
    """The list of supported architectures and the list of tested ones are the same."""
    import transformers

    model_types = {getattr(transformers, config).model_type for config, _ in TINY_ARCHITECTURES.values()}
    assert {model_class_name(model_type) for model_type in model_types} == SUPPORTED
