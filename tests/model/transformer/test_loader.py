"""Loading: what is refused, and that no weight is ever left random."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from aexec.config import ModelConfig
from aexec.errors import ConfigError, ModelLoadError, OutOfMemory, UnsupportedModel
from aexec.model.sources.resolve import open_directory
from aexec.model.transformer import loader
from aexec.model.transformer.hooks import Stage
from aexec.model.transformer.loader import LoadedModel, choose_dtype, load_model

CPU = torch.device("cpu")


def load(directory: Path, stage: Stage | None = None, progress=None, **settings) -> LoadedModel:
    config = ModelConfig(model=str(directory), **settings)
    return load_model(open_directory(directory), config, stage=stage or Stage(), device=CPU, progress=progress)


@pytest.fixture
def copied(tiny_model, tmp_path):
    """A copy of a tiny model that may be damaged."""

    def copy(name: str) -> Path:
        return shutil.copytree(tiny_model(name), tmp_path / name)

    return copy


def change_config(directory: Path, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_loaded_model_knows_its_sizes(tiny_model) -> None:
    """Everything the runner and the engine ask for."""
    model = load(tiny_model("qwen3"))
    assert (model.architecture, model.dtype, model.vocab_size) == ("Qwen3ForCausalLM", torch.float32, 512)
    assert model.max_model_len == 512
    assert list(model.kv_shapes) == [0, 1, 2, 3]
    assert (model.kv_shapes[0].num_heads, model.kv_shapes[0].head_dim) == (2, 16)


def test_progress_reaches_its_end(tiny_model) -> None:
    """Weights are counted, then packing; both end with done equal to total."""
    seen: list[tuple[str, float, float]] = []
    load(tiny_model("llama"), progress=lambda *told: seen.append(told))
    last = {phase: (done, total) for phase, done, total in seen}
    assert list(last) == ["weights", "pack"]
    assert all(done == total > 0 for done, total in last.values())


def test_loading_prints_nothing(tiny_model, capfd) -> None:
    """No bar, no warning: progress is the caller's to show."""
    load(tiny_model("gpt2"))
    assert capfd.readouterr() == ("", "")


def test_an_architecture_that_is_not_tested_is_refused_by_name(copied) -> None:
    """It names the class, those that are supported, and how to insist."""
    directory = copied("llama")
    change_config(directory, model_type="falcon")
    with pytest.raises(
        UnsupportedModel, match=r"FalconForCausalLM is not among .*LlamaForCausalLM.*allow_untested=True"
    ):
        load(directory)


def test_who_insists_gets_it_loaded(copied) -> None:
    """``allow_untested`` lets an architecture through that the list does not have."""
    directory = copied("llama")
    change_config(directory, model_type="granite", architectures=["GraniteForCausalLM"])
    assert load(directory, allow_untested=True).architecture == "GraniteForCausalLM"


def test_a_model_that_writes_no_text_is_refused(copied) -> None:
    """Transformers has no causal language model for its type."""
    directory = copied("llama")
    change_config(directory, model_type="vit")
    with pytest.raises(UnsupportedModel, match=r"has model_type 'vit', for which"):
        load(directory)


@pytest.mark.parametrize("lost", ["model.layers.2.mlp.up_proj.weight", "lm_head.weight"])
def test_a_missing_weight_is_an_error(copied, lost) -> None:
    """It is never left as it was drawn; the error names it."""
    directory = copied("llama")
    weights = load_file(directory / "model.safetensors")
    del weights[lost]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=f"lacks weights of LlamaForCausalLM.*{lost}"):
        load(directory)


def test_a_missing_weight_of_another_stage_is_not_missed(copied) -> None:
    """A stage reads its own layers only."""
    directory = copied("gpt_neox")
    weights = load_file(directory / "model.safetensors")
    gone = [name for name in weights if ".layers.3." in name]
    kept = {name: tensor for name, tensor in weights.items() if name not in gone}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    assert gone
    assert list(load(directory, Stage(0, 2)).kv_shapes) == [0, 1]
    with pytest.raises(ModelLoadError, match=r"lacks weights of GPTNeoXForCausalLM"):
        load(directory, Stage(1, 2))


def test_a_weight_of_another_shape_is_an_error(copied) -> None:
    """As when configuration and weights are of two models."""
    directory = copied("llama")
    change_config(directory, intermediate_size=64)
    with pytest.raises(ModelLoadError, match=r"could not be loaded as LlamaForCausalLM|in another shape"):
        load(directory)


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(tiny_model, monkeypatch) -> None:
    """Need and have, from the headers alone; nothing is read."""
    monkeypatch.setattr(loader, "free_host_bytes", lambda: 500_000)
    monkeypatch.setattr(loader, "load_stage", pytest.fail)
    with pytest.raises(OutOfMemory, match=r"in float32 on cpu needs 898\.2 KiB and 488\.3 KiB are available") as caught:
        load(tiny_model("llama"))
    assert caught.value.need_bytes == 229_952 * 4


def test_ranks_that_share_layers_share_the_need_and_the_host(tiny_model, monkeypatch) -> None:
    """Each of two needs half of what one does, and may count on half of what is free."""
    monkeypatch.setattr(loader, "free_host_bytes", lambda: 500_000)
    files = open_directory(tiny_model("llama"))
    with pytest.raises(OutOfMemory, match=r"or more ranks") as caught:
        load_model(files, ModelConfig(model="x"), stage=Stage(), device=CPU, tensor=SimpleNamespace(size=2))
    assert (caught.value.need_bytes, caught.value.have_bytes) == (229_952 * 2, 250_000)


def test_half_the_dtype_needs_half_the_memory(tiny_model, monkeypatch) -> None:
    """So that the remedy the error names does help; a pipeline stage needs less as well."""
    monkeypatch.setattr(loader, "free_host_bytes", lambda: 700_000)
    with pytest.raises(OutOfMemory):
        load(tiny_model("llama"))
    assert load(tiny_model("llama"), dtype="bfloat16").num_parameters == 229_952
    assert load(tiny_model("llama"), Stage(1, 2)).num_parameters < 229_952


def test_more_context_than_the_model_has_positions_is_refused(tiny_model) -> None:
    """It names both numbers; less is taken."""
    with pytest.raises(ConfigError, match=r"max_model_len is 513: expected at most 512"):
        load(tiny_model("llama"), max_model_len=513)
    assert load(tiny_model("llama"), max_model_len=100).max_model_len == 100


@pytest.mark.parametrize(
    ("asked", "device", "expected"),
    [
        ("auto", "cpu", torch.float32),
        ("auto", "cuda", torch.bfloat16),
        ("float16", "cpu", torch.float16),
        ("float32", "cuda", torch.float32),
    ],
)
def test_the_dtype_is_the_users_or_follows_the_device(copied, asked, device, expected) -> None:
    """``auto`` is float32 on a CPU and the checkpoint's own on CUDA."""
    directory = copied("llama")
    change_config(directory, dtype="bfloat16")
    files = open_directory(directory)
    assert choose_dtype(ModelConfig(model="x", dtype=asked), files, torch.device(device)) is expected


def test_a_dtype_that_torch_does_not_have_is_refused(copied) -> None:
    """The configuration is at fault, and the user can overrule it."""
    directory = copied("llama")
    change_config(directory, dtype="int3")
    with pytest.raises(ConfigError, match=r"has dtype 'int3': set ModelConfig.dtype"):
        choose_dtype(ModelConfig(model="x"), open_directory(directory), torch.device("cuda"))
