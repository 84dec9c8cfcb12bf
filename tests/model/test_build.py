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


def test_tensor_parallel_ranks_are_refused() -> None:
    """Layers are not split yet; the setting is named."""
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2: expected 1"):
        build_runner(ModelConfig(model="x"), CacheConfig(), tp_rank=1, tp_size=2)


def test_missing_extra_is_a_config_error() -> None:
    """The user mends it, as any other setting."""
    assert issubclass(MissingExtra, ConfigError)
