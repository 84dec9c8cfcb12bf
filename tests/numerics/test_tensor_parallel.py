"""SmolLM2 on three ranks, one for each of its KV heads: what one process says, with a third of the memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.timeout(300)

RANKS = Path(__file__).parents[1] / "model" / "transformer" / "rank_process.py"
PROMPTS = {"short": [1, 4093, 198, 1780, 418], "long": [(37 * place + 11) % 4000 for place in range(40)]}
TOLERANCE = 5e-4  # float32 logits of up to 33; seen: 6e-5


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What three ranks saw together, and then the first of them alone."""
    home = tmp_path_factory.mktemp("smollm2")
    spec = importlib.util.spec_from_file_location("rank_process", RANKS)
    process = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(process)
    job = {"model": "smollm2", "dtype": "float32", "budget": 16, "prompts": PROMPTS, "num_new": 4, "checks": False}
    rounds = [(3, 1, [{**job, "name": "split"}]), (1, 1, [{**job, "name": "whole"}])]
    process.launch(rounds, home, 3, timeout=250)
    return [torch.load(home / f"split-{rank}.pt") for rank in range(3)], torch.load(home / "whole-0.pt")


def test_three_ranks_say_what_one_says(saved) -> None:
    """Tokens are equal on all ranks; logits, which the first one has, within the tolerance."""
    split, whole = saved
    assert [each["outputs"] for each in split] == [whole["outputs"]] * 3
    for name in PROMPTS:
        assert (split[0]["logits"][name] - whole["logits"][name]).abs().max() < TOLERANCE


def test_each_rank_holds_a_third(saved) -> None:
    """Of the parameters, of the KV heads, of the weights in memory; and its process grows by as much, not by the whole."""
    split, whole = saved
    assert [each["kv_heads"] for each in split] == [[1]] * 3
    for each in split:
        assert each["parameters"] < 0.34 * whole["parameters"]
        assert each["weight_bytes"] < 0.34 * whole["weight_bytes"]
        assert each["grown_bytes"] < each["weight_bytes"] + 200 * 2**20 < 0.7 * whole["weight_bytes"]
