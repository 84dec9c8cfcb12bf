"""Reinforcement learning around the engine: sample, reward, train, put the new weights in, sample again.

A tiny model learns to say even tokens. Run it as it is, with ``mp 2``, or by torchrun, whose ranks also train together.
"""

from __future__ import annotations

import sys
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers as _transformers

from aexec import LLM, SamplingParams
from aexec.testing.tiny_models import save_tiny_model

dist: Any = torch.distributed
transformers: Any = _transformers  # the annotations of both are partial
PROMPTS = [[11, 7, 5 * number] for number in range(4)]
SAMPLING = SamplingParams(n=16, max_tokens=8, logprobs=0, ignore_eos=True)


def train(model: Any, optimizer: torch.optim.Optimizer, tokens: Any, old: Any, advantages: Any) -> None:
    for _ in range(4):
        optimizer.zero_grad()
        logprobs = model(tokens[:, :-1]).logits[:, -8:].log_softmax(-1)
        ratio = (logprobs.gather(-1, tokens[:, -8:, None])[..., 0] - old).exp()
        loss: Any = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        loss.backward()
        for parameter in model.parameters() if size > 1 else ():
            dist.all_reduce(parameter.grad)
        optimizer.step()


def main(directory: str, executor: str, ranks: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with LLM(directory, executor=executor, tensor_parallel_size=int(ranks), num_blocks=256, seed=0) as llm:
        for step in range(1, 11):
            samples = [each for answer in llm.generate(PROMPTS, SAMPLING) for each in answer.samples]
            new = torch.tensor([each.token_ids for each in samples])
            old = torch.tensor([[token.logprob for token in each.logprobs or ()] for each in samples])
            tokens, rewards = torch.cat((torch.tensor(PROMPTS).repeat_interleave(16, 0), new), 1), (new % 2 == 0) * 1.0
            advantages = (rewards.mean(1) - rewards.mean())[:, None] / (rewards.mean(1).std() + 1e-6)
            train(model, optimizer, *(each[rank::size] for each in (tokens, old, advantages)))  # this process's share
            llm.pause()
            llm.update_weights(model.state_dict())
            llm.resume()
            if rank == 0:
                print(f"step {step}: reward {rewards.mean():.2f}")


transformers.utils.logging.disable_progress_bar()
with TemporaryDirectory() as directory:
    save_tiny_model("llama", directory)  # before there is a world: in one only rank 0 would save anything
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    main(directory, *(["external_launcher", str(size)] if size > 1 else sys.argv[1:3] or ["uni", "1"]))
