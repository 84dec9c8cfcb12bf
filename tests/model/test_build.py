"""Which runner a model gets."""

from __future__ import annotations

import subprocess
import sys

import pytest

from aexec.config import CacheConfig, ModelConfig
from aexec.errors import ConfigError, MissingExtra
from aexec.model.build import build_runner
from aexec.model.dummy.runner import DummyRunner
from aexec.model.transformer.runner import TorchRunner

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # importing them fails, as if they were not installed
from aexec.config import CacheConfig, ModelConfig
from aexec.errors import MissingExtra
from aexec.model.build import build_runner
build_runner(ModelConfig(model="dummy"), CacheConfig())
try:
    build_runner(ModelConfig(model="smollm2"), CacheConfig())
except MissingExtra as error:
    print(error)
"""


def test_the_dummy_needs_no_torch_and_a_model_names_the_extra() -> None:
    """Without torch the dummy runs, and any other model says how to install what it needs."""
    ran = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=50, check=True)
    assert ran.stdout.strip() == (
        "the torch model runner needs the extra 'models' (torch is not installed): pip install 'aexec[models]'"
    )


def test_a_name_decides_the_runner(tiny_model) -> None:
    """``dummy`` is the one without a model; nothing is loaded yet."""
    assert isinstance(build_runner(ModelConfig(model="dummy"), CacheConfig()), DummyRunner)
    runner = build_runner(ModelConfig(model=str(tiny_model("llama"))), CacheConfig(), device="cpu")
    assert isinstance(runner, TorchRunner)
    assert repr(runner).endswith("not loaded on cpu, None, 0 to sample>")


def test_the_device_is_the_workers_then_the_users_then_what_there_is(monkeypatch) -> None:
    """``auto`` asks the next one; the last answer is CUDA where there is one."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    model = ModelConfig(model="x")
    assert "on cuda" in repr(build_runner(model, CacheConfig()))
    assert "on cpu" in repr(build_runner(ModelConfig(model="x", device="cpu"), CacheConfig()))
    assert "on cpu" in repr(build_runner(model, CacheConfig(), device="cpu"))


def test_a_rank_that_shares_layers_has_to_be_told_with_whom(tiny_model) -> None:
    """Without a process group it loads nothing: its part alone would answer, and wrongly."""
    runner = build_runner(ModelConfig(model=str(tiny_model("llama"))), CacheConfig(), tp_rank=1, tp_size=2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2, .* call join\(\) before load_model\(\)"):
        runner.load_model()


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_cuda_device_that_is_not_there_is_named(monkeypatch, device) -> None:
    """With what torch sees, before it has loaded anything."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigError, match=rf"device is '{device}', and torch .* sees none: take device='cpu'"):
        build_runner(ModelConfig(model="x", device=device), CacheConfig())


@pytest.mark.parametrize("device", ["gpu", "mps", "cuda:x"])
def test_a_device_of_another_kind_is_refused(device) -> None:
    """With the kinds that there are."""
    with pytest.raises(ConfigError, match=f"device is '{device}': expected auto, cpu, cuda"):
        build_runner(ModelConfig(model="x", device=device), CacheConfig())


def test_missing_extra_is_a_config_error() -> None:
    """The user mends it, as any other setting."""
    assert issubclass(MissingExtra, ConfigError)


def test_each_rank_of_a_node_takes_its_own_cuda_device(monkeypatch) -> None:
    """By its place on the node; a rank alone takes the current one, and a rank without one is refused (RNK-07)."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    model, cache = ModelConfig(model="x"), CacheConfig()
    assert build_runner(model, cache, pp_rank=1, pp_size=2, local_rank=1).device == "cuda:1"
    assert build_runner(model, cache, local_rank=1).device == "cuda"
    assert build_runner(model, cache, local_rank=1, num_local_ranks=2).device == "cuda:1"  # two replicas
    with pytest.raises(ConfigError, match="rank 2 of this node has no CUDA device: torch sees 2"):
        build_runner(model, cache, pp_rank=2, pp_size=3, local_rank=2)
