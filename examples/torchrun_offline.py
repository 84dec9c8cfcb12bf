"""Every process that torchrun starts is a rank: all run this script, make the same calls, and get the same answers.

With the extra ``models``: ``torchrun --nproc-per-node 2 examples/torchrun_offline.py``, whose ranks share each layer.
With four processes ``--pp 2`` makes two stages of them, and ``--tp 2`` alone two replicas, each with its own prompts.
``--check`` compares, on every rank, with what one process alone says.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from aexec import LLM, SamplingParams
from aexec.testing.tiny_models import save_tiny_model

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PROMPTS = [[7 * number, 31, 5 + number] for number in range(8)]
SAMPLING = [SamplingParams(max_tokens=12, temperature=number % 2, seed=number) for number in range(8)]


def main(model: str, tp: int, pp: int, *, check: bool) -> None:
    num_replicas = WORLD_SIZE // (tp * pp)
    replica = RANK // (tp * pp)
    prompts, sampling = PROMPTS[replica::num_replicas], SAMPLING[replica::num_replicas]
    with LLM(model, executor="external_launcher", tensor_parallel_size=tp, pipeline_parallel_size=pp) as llm:
        answers = [answer.token_ids for answer in llm.generate(prompts, sampling)]
    if RANK == 0:
        for prompt, answer in zip(prompts, answers, strict=True):
            print(*prompt, "->", *answer)
    if check:
        with LLM(model, executor="uni") as llm:
            alone = [answer.token_ids for answer in llm.generate(prompts, sampling)]
        print(f"rank {RANK}: {len(answers)} answers, {'equal' if answers == alone else 'NOT equal'} to one process's")
        sys.exit(answers != alone)


parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=2)
parser.add_argument("--pp", type=int, default=1)
parser.add_argument("--check", action="store_true")
options = parser.parse_args()
with TemporaryDirectory() as directory:  # a tiny model with random weights, the same on every rank
    main(str(save_tiny_model("llama", Path(directory))), options.tp, options.pp, check=options.check)
