"""Layers shared among ranks, over every architecture that has a plan, in real processes.

Four processes are started once and run all jobs; tests look at what they saved. What they
have to say is what one process says for the same requests, in steps that cut prompts and
mix them with decodes.

Tolerance of float32 logits: 1e-4 absolute at |logit| of 4 to 11; seen: 2e-5.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from aexec.model.transformer.packed import PackedLinear
from aexec.testing.tiny_models import TINY_ARCHITECTURES

pytestmark = pytest.mark.timeout(240)  # the first test pays for all processes

WORLD = 4
TOLERANCE = 1e-4
NUM_NEW = 8
BUDGET = 16
generator = torch.Generator().manual_seed(5)
PROMPTS = {f"r{n}": torch.randint(3, 512, (n,), generator=generator).tolist() for n in (1, 5, 23, 40)}

SPLIT = [name for name in TINY_ARCHITECTURES if name not in ("gpt2", "opt")]
UNEVEN = {"vocab_size": 511, "intermediate_size": 127}  # neither divides by two


class Layout(NamedTuple):
    """Sizes of a layout, and the models that run in it."""

    tensor: int
    pipeline: int
    names: tuple[str, ...]


LAYOUTS = {
    "tp2": Layout(2, 1, (*SPLIT, "uneven")),
    "tp2xpp2": Layout(2, 2, ("llama_gqa", "qwen3", "gemma3", "phi3", "gpt_neox", "mixtral")),
    "tp4": Layout(4, 1, ("llama", "phi", "gpt_neox")),
}
CASES = [(layout, name) for layout, each in LAYOUTS.items() for name in each.names]


@pytest.fixture(scope="session")
def model_of(tiny_model):
    """The directory of a model by its name here."""

    def find(name: str) -> Path:
        return tiny_model("llama", **UNEVEN) if name == "uneven" else tiny_model(name)

    return find


@pytest.fixture(scope="session")
def saved(model_of, tmp_path_factory) -> Path:
    """Where four processes have left what they saw of all jobs."""
    home = tmp_path_factory.mktemp("ranks")
    rounds = [
        (each.tensor, each.pipeline, [job(layout, name, model_of(name)) for name in each.names])
        for layout, each in LAYOUTS.items()
    ]
    spec = importlib.util.spec_from_file_location("rank_process", Path(__file__).with_name("rank_process.py"))
    process = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(process)
    process.launch(rounds, home, WORLD, timeout=200)
    return home


def job(layout: str, name: str, model: Path) -> dict[str, Any]:
    requests = {"budget": BUDGET, "prompts": PROMPTS, "num_new": NUM_NEW}
    return {"name": f"{layout}-{name}", "model": str(model), "dtype": "float32", "checks": True, **requests}


def ranks(saved: Path, layout: str, name: str) -> list[dict[str, Any]]:
    count = LAYOUTS[layout].tensor * LAYOUTS[layout].pipeline
    return [torch.load(saved / f"{layout}-{name}-{rank}.pt") for rank in range(count)]


class Alone:
    """A runner by itself that keeps the logits before they are spent."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.logits: dict[str, list[torch.Tensor]] = {}

    def execute_model(self, batch: Any) -> None:
        self.runner.execute_model(batch)

    def sample_tokens(self, grammar: Any) -> Any:
        pending = self.runner._pending[0]
        for row, state in enumerate(pending.sampled):
            self.logits.setdefault(state.request_id, []).append(pending.logits[row].clone())
        return self.runner.sample_tokens(grammar)


@pytest.fixture(scope="session")
def alone(model_of, ready_runner, request):
    """What one process says: outputs, logits, number of parameters; once for each model."""
    known: dict[str, tuple[Any, ...]] = {}

    def run(name: str, scheduler: Any) -> tuple[Any, ...]:
        if name not in known:
            runner = Alone(ready_runner(model_of(name), block_size=8))
            for request_id, prompt in PROMPTS.items():
                scheduler.add(request_id, prompt, NUM_NEW, ignore_eos=True)
            outputs = scheduler.run(runner)
            known[name] = outputs, runner.logits, runner.runner.info().num_parameters
        return known[name]

    return run


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_ranks_together_say_what_one_process_says(layout, name, saved, alone, toy_scheduler) -> None:
    """All tokens of all requests are equal, and logits within the tolerance."""
    outputs, logits, _ = alone(name, toy_scheduler(block_size=8, budget=BUDGET))
    found = ranks(saved, layout, name)
    output_rank = len(found) - LAYOUTS[layout].tensor
    assert [each["outputs"] for each in found] == [outputs] * len(found)
    for request, rows in logits.items():
        torch.testing.assert_close(found[output_rank]["logits"][request], torch.stack(rows), rtol=0, atol=TOLERANCE)
    assert [rank for rank, each in enumerate(found) if each["logits"]] == [output_rank]


@pytest.mark.parametrize("name", LAYOUTS["tp2"].names)
def test_a_rank_holds_its_part_of_the_weights_only(name, saved, alone, toy_scheduler) -> None:
    """Two ranks hold what one holds, and hardly more: norms, and what routes to experts, are on both."""
    _, _, num_parameters = alone(name, toy_scheduler(block_size=8, budget=BUDGET))
    found = [each["parameters"] for each in ranks(saved, "tp2", name)]
    assert num_parameters <= sum(found) < 1.02 * num_parameters
    assert max(found) < 0.52 * num_parameters


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_a_rank_stores_its_own_heads_and_layers_only(layout, name, saved, tiny_model) -> None:
    """KV heads are dealt out, except in Phi3, whose fused projection is joined; layers are those of its stage."""
    sizes = LAYOUTS[layout]
    whole = TINY_ARCHITECTURES["llama" if name == "uneven" else name][1]
    heads = whole.get("num_key_value_heads", whole["num_attention_heads"])
    for rank, each in enumerate(ranks(saved, layout, name)):
        assert each["kv_heads"] == [heads if name == "phi3" else heads // sizes.tensor]
        share = 4 // sizes.pipeline
        first = share * (rank // sizes.tensor)
        assert each["layers"] == list(range(first, first + share))


@pytest.mark.parametrize("name", LAYOUTS["tp2"].names)
def test_the_parts_are_packed_as_whole_layers_are(name, saved, tiny_model, ready_runner, model_of) -> None:
    """Each linear layer that is packed in one process is packed on every rank, under its name or its wrapper's."""
    model = ready_runner(model_of(name))._store.model.module
    expected = [path for path, module in model.named_modules() if isinstance(module, PackedLinear)]
    assert expected
    for each in ranks(saved, "tp2", name):
        assert [path.removesuffix(".shard") for path in each["packed"]] == expected


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_a_rank_can_tell_its_part_of_any_weight(layout, name, saved) -> None:
    """What ``LoadedModel.shard`` cuts out of the whole weights is, to the bit, what the rank has loaded."""
    assert [each["misread"] for each in ranks(saved, layout, name)] == [[]] * len(ranks(saved, layout, name))
