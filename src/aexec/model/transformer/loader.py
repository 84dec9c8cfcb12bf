"""From a model's files to one rank's model on its device, ready to be run by steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aexec.config import ModelConfig
from aexec.errors import ConfigError, OutOfMemory, UnsupportedModel
from aexec.model.base import LoadProgress
from aexec.model.memory import free_host_bytes
from aexec.model.sources.checkpoint import num_elements, read_headers
from aexec.model.sources.resolve import ModelFiles
from aexec.model.transformer.attention import ATTENTION_NAME, paged_attention
from aexec.model.transformer.hooks import Stage, load_stage, model_class_name, register_attention, silent
from aexec.model.transformer.kv_cache import KVShape
from aexec.model.transformer.packed import can_pack, pack_linears

__all__ = ("SUPPORTED", "LoadedModel", "attention_modules", "choose_dtype", "free_bytes", "load_model", "text_config")

# Each of them goes through tests/model/test_conformance.py.
SUPPORTED = frozenset(
    {
        "GPT2LMHeadModel",
        "GPTNeoXForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GemmaForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "OPTForCausalLM",
        "Phi3ForCausalLM",
        "PhiForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    }
)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """One rank's model.

    Attributes:
        module: The model of ``transformers``.
        architecture: Its class name.
        dtype: Of weights, activations and KV cache.
        device: Where it is.
        kv_shapes: What each of this rank's layers stores, by layer index.
        vocab_size: Rows of the output head.
        max_model_len: Tokens of a request at most.
        num_parameters: That this rank holds.
    """

    module: Any
    architecture: str
    dtype: torch.dtype
    device: torch.device
    kv_shapes: dict[int, KVShape]
    vocab_size: int
    max_model_len: int
    num_parameters: int


def load_model(
    files: ModelFiles, config: ModelConfig, *, stage: Stage, device: torch.device, progress: LoadProgress | None = None
) -> LoadedModel:
    """Load one stage's weights.

    Raises:
        UnsupportedModel: Its architecture is not in :data:`SUPPORTED`, and the user did not insist.
        ConfigError: ``max_model_len`` is more than the model can do.
        OutOfMemory: It does not fit; found before anything is loaded.
        ModelLoadError: The files are damaged or incomplete.
    """
    architecture = _architecture(files, allow_untested=config.allow_untested)
    dtype = choose_dtype(config, files, device)
    _check_fits(files, dtype, stage, device)
    register_attention(ATTENTION_NAME, paged_attention)
    with silent(progress):
        module: Any = load_stage(files.directory, architecture, stage, dtype=dtype, attention=ATTENTION_NAME).to(device)
    text = text_config(module)
    loaded = LoadedModel(
        module=module,
        architecture=architecture,
        dtype=dtype,
        device=device,
        kv_shapes={layer: _kv_shape(attention, text) for layer, attention in attention_modules(module)},
        vocab_size=int(text.vocab_size),
        max_model_len=_max_model_len(config, text),
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
    )
    if device.type == "cpu":
        if can_pack(dtype):
            _pack(module, progress)
        _own_weights(module)
    return loaded


def choose_dtype(config: ModelConfig, files: ModelFiles, device: torch.device) -> torch.dtype:
    """The dtype that the user asked for; ``auto`` is float32 on a CPU, else the checkpoint's own."""
    name: str = config.dtype
    if name == "auto":
        own = files.config.get("dtype") or files.config.get("torch_dtype") or "float32"
        name = "float32" if device.type == "cpu" else str(own)
    if name not in _DTYPES:
        raise ConfigError(f"{files.directory}/config.json has dtype {name!r}: set ModelConfig.dtype to another")
    return _DTYPES[name]


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device now."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()


def text_config(module: Any) -> Any:
    """The part of a model's configuration that is about text."""
    return module.config.get_text_config()


def attention_modules(module: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """The attention modules of this rank's layers, with their layer's index in the whole model."""
    for child in module.modules():
        layer = getattr(child, "layer_idx", None)
        if layer is not None and (hasattr(child, "is_causal") or type(child).__name__.endswith("Attention")):
            yield layer, child


def _architecture(files: ModelFiles, *, allow_untested: bool) -> str:
    name = model_class_name(files.model_type)
    if name is None:
        raise UnsupportedModel(
            f"{files.directory} has model_type {files.model_type!r}, for which transformers has no causal language model"
        )
    if name not in SUPPORTED and not allow_untested:
        raise UnsupportedModel(
            f"{name} is not among the architectures that aexec is tested with ({', '.join(sorted(SUPPORTED))}): "
            "set ModelConfig.allow_untested=True to load it all the same"
        )
    return name


def _check_fits(files: ModelFiles, dtype: torch.dtype, stage: Stage, device: torch.device) -> None:
    entries = read_headers(files.weights)
    num_layers = 1 + max((entry.layer for entry in entries if entry.layer is not None), default=0)
    own = None if stage.size == 1 else stage.layers(num_layers)
    need = num_elements(entries, own) * dtype.itemsize
    if device.type == "cpu" and can_pack(dtype) and files.config.get("tie_word_embeddings"):
        # Packing gives a tied head a copy of its own.
        need += max((entry.num_elements for entry in entries if entry.layer is None), default=0) * dtype.itemsize
    have = free_bytes(device)
    if need > have:
        raise OutOfMemory(
            f"loading {files.name} in {str(dtype).removeprefix('torch.')} on {device}", need, have,
            "take a smaller dtype or model, or more pipeline stages",
        )  # fmt: skip


def _max_model_len(config: ModelConfig, text: Any) -> int:
    own = int(text.max_position_embeddings)
    if config.max_model_len is not None and config.max_model_len > own:
        raise ConfigError(
            f"ModelConfig.max_model_len is {config.max_model_len}: expected at most {own}, the positions of {config.model}"
        )
    return config.max_model_len or own


def _kv_shape(attention: Any, text: Any) -> KVShape:
    num_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(attention, "head_dim", None) or getattr(text, "head_dim", None)
    return KVShape(int(num_heads), int(head_dim or text.hidden_size // text.num_attention_heads))


@torch.no_grad()
def _own_weights(module: nn.Module) -> None:
    """Copy what still is a view of the mapped file, so that nobody depends on the file any more."""
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def _pack(module: nn.Module, progress: LoadProgress | None) -> None:
    total = float(sum(child.weight.nbytes for child in module.modules() if type(child) is nn.Linear))
    done = 0.0

    def on_packed(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress("pack", done, total)

    with torch.inference_mode():
        pack_linears(module, on_packed)
