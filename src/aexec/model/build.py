"""One rank's model runner, from settings; the only place that chooses between runners."""

from __future__ import annotations

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
    device: str = "auto",
    progress: LoadProgress | None = None,
) -> ModelRunner:
    """A runner that has loaded nothing yet; call ``load_model`` next.

    Args:
        model_config: Which model; ``dummy`` needs no torch.
        cache_config: Sizes of the KV cache.
        tp_rank: Place among the ranks that share its layers.
        tp_size: How many they are.
        pp_rank: Its pipeline stage.
        pp_size: How many there are.
        device: As in ``cpu`` or ``cuda:0``; ``auto`` takes ``ModelConfig.device``, and if
            that is ``auto`` too CUDA where there is one.
        progress: Told how far loading has come.

    Raises:
        MissingExtra: torch or ``transformers`` is not installed.
        ConfigError: The layout is not possible.
    """
    if is_dummy(model_config.model):
        from aexec.model.dummy.runner import DummyRunner

        return DummyRunner(model_config, cache_config)
    if (tp_rank, tp_size) != (0, 1):
        raise ConfigError(f"tensor_parallel_size is {tp_size}: expected 1, the model runner does not split layers yet")
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
    return TorchRunner(model_config, cache_config, stage=Stage(pp_rank, pp_size), device=device, progress=progress)
