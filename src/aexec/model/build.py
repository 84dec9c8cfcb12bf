"""One rank's model runner, from settings; the only place that chooses between runners."""

from __future__ import annotations

from typing import Any

from aexec.config import CacheConfig, ModelConfig
from aexec.errors import ConfigError, MissingExtra
from aexec.model.base import LoadProgress, ModelRunner
from aexec.model.dummy.settings import is_dummy

__all__ = ("build_runner",)


def build_runner(
    model_config: ModelConfig,
    cache_config: CacheConfig,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    pp_rank: int = 0,
    pp_size: int = 1,
    partition: tuple[int, ...] | None = None,
    device: str = "auto",
    local_rank: int = 0,
    num_local_ranks: int = 0,
    progress: LoadProgress | None = None,
) -> ModelRunner:
    """A runner that has loaded nothing yet; call ``load_model`` next.

    Args:
        model_config: Which model; ``dummy`` needs no torch.
        cache_config: Sizes of the KV cache.
        tp_rank: Place among the ranks that share its layers.
        tp_size: How many they are; if more than one, ``join`` has to be called before ``load_model``.
        pp_rank: Its pipeline stage.
        pp_size: How many there are.
        partition: Layers of each stage; None balances them.
        device: As in ``cpu`` or ``cuda:0``; ``auto`` takes ``ModelConfig.device``, and if
            that is ``auto`` too CUDA where there is one. ``cuda`` takes the device of ``local_rank``
            where there are several ranks.
        local_rank: Place among the ranks of this node.
        num_local_ranks: How many ranks this node has, those of other replicas too; 0: those of this model.
        progress: Told how far loading has come.

    Raises:
        MissingExtra: torch or ``transformers`` is not installed.
        ConfigError: The layout is not possible, or there is no such device.
    """
    samples = (tp_rank, pp_rank) == (0, pp_size - 1)  # the output rank, and no other
    if is_dummy(model_config.model):
        from aexec.model.dummy.runner import DummyRunner

        return DummyRunner(model_config, cache_config, stage=pp_rank, num_stages=pp_size, samples=samples)
    try:
        import torch

        from aexec.model.transformer.hooks import Stage
        from aexec.model.transformer.runner import TorchRunner
    except ModuleNotFoundError as error:
        raise MissingExtra("the torch model runner", "models", error.name or "") from error
    if device == "auto":
        device = model_config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and max(tp_size * pp_size, num_local_ranks) > 1:
        device = _own_device(local_rank, torch.cuda.device_count())
    _check_device(device, torch)
    stage = Stage(pp_rank, pp_size, partition)
    return TorchRunner(
        model_config, cache_config, stage=stage, tp_rank=tp_rank, tp_size=tp_size, samples=samples, device=device,
        num_sharers=num_local_ranks, progress=progress,
    )  # fmt: skip


def _check_device(device: str, torch: Any) -> None:
    """Before torch says it in words of its own, or in the middle of loading."""
    try:
        kind, place = torch.device(device).type, torch.device(device).index or 0
    except (RuntimeError, TypeError):
        kind, place = "", 0
    if kind not in {"cpu", "cuda"}:
        raise ConfigError(f"device is {device!r}: expected auto, cpu, cuda, or one of several as in cuda:0")
    if kind == "cuda" and not (torch.cuda.is_available() and place < max(torch.cuda.device_count(), 1)):
        raise ConfigError(
            f"device is {device!r}, and torch {torch.__version__} sees {torch.cuda.device_count() or 'none'}: "
            "take device='cpu', or look at CUDA_VISIBLE_DEVICES, at the driver, and at whether this torch was built for CUDA"
        )


def _own_device(local_rank: int, num_devices: int) -> str:
    if local_rank >= num_devices:
        raise ConfigError(
            f"rank {local_rank} of this node has no CUDA device: torch sees {num_devices or 'none'}; "
            "take fewer ranks, or look at CUDA_VISIBLE_DEVICES"
        )
    return f"cuda:{local_rank}"
