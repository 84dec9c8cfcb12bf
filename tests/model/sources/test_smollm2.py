"""The real model, through the runner: a small check; the large one goes through AsyncLLM."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from aexec.model.sources.resolve import resolve_model
from aexec.model.transformer.hooks import silent


@pytest.mark.timeout(300)  # the first run on a machine converts the model
def test_smollm2_says_what_generate_says(ready_runner, toy_scheduler) -> None:
    """Three prompts in chunked and mixed steps, in float32: the tokens of generate for each alone."""
    directory = resolve_model("smollm2").directory
    with silent():
        tokenizer = AutoTokenizer.from_pretrained(directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    texts = ["The capital of France is", "Once upon a time, in a small village by the sea, there lived", "1, 2, 3, 4,"]
    prompts = {text: tokenizer(text).input_ids for text in texts}
    scheduler = toy_scheduler(budget=8)
    for text, prompt in prompts.items():
        scheduler.add(text, prompt, 8, ignore_eos=True)
    outputs = scheduler.run(ready_runner("smollm2"))
    assert scheduler.num_mixed_steps
    for text, prompt in prompts.items():
        ids = torch.tensor([prompt])
        with silent(), torch.inference_mode():
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        assert outputs[text][: expected.shape[1] - len(prompt)] == expected[0, len(prompt) :].tolist()
    assert tokenizer.decode(outputs[texts[0]]).startswith(" Paris")
