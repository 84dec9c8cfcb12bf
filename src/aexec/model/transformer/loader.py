"""From a model's files to one rank's model on its device, ready to be run by steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aexec.config import ModelConfig
from aexec.errors import ConfigError, OutOfMemory, UnsupportedModel
from aexec.model.base import LoadProgress
from aexec.model.memory import free_host_bytes
from aexec.model.sources.checkpoint import end_costs, num_elements
from aexec.model.sources.resolve import ModelFiles
from aexec.model.sources.sharded import read_index, whole_entries
from aexec.model.transformer.attention import ATTENTION_NAME, paged_attention
from aexec.model.transformer.hooks import (
    Stage,
    kv_heads_per_rank,
    load_stage,
    model_class_name,
    read_config,
    register_attention,
    silent,
)
from aexec.model.transformer.kv_cache import KVShape
from aexec.model.transformer.packed import can_pack, pack_linears
from aexec.model.transformer.shards import share_out
from aexec.model.transformer.split import check_split
from aexec.model.transformer.weights import Shard, whole
from aexec.parallel.tensor import Split, TensorGroup

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
        shard: Takes the name and the tensor of a weight of the whole model to what this rank holds of it.
    """

    module: Any
    architecture: str
    dtype: torch.dtype
    device: torch.device
    kv_shapes: dict[int, KVShape]
    vocab_size: int
    max_model_len: int
    num_parameters: int
    shard: Shard = whole


def load_model(
    files: ModelFiles,
    config: ModelConfig,
    *,
    stage: Stage,
    device: torch.device,
    tensor: TensorGroup | None = None,
    progress: LoadProgress | None = None,
) -> LoadedModel:
    """Load one stage's weights, or this rank's part of them.

    Args:
        files: Where they are.
        config: How the model is held.
        stage: This rank's share of the layers.
        device: Where to.
        tensor: The ranks that share each of these layers; None: this rank has them whole.
        progress: Told how far loading has come.

    Raises:
        UnsupportedModel: Its architecture is not in :data:`SUPPORTED`, and the user did not insist;
            or it cannot be split in as many parts.
        ConfigError: ``max_model_len`` is more than the model can do.
        OutOfMemory: It does not fit; found before anything is loaded.
        ModelLoadError: The files are damaged or incomplete.
    """
    architecture = _architecture(files, allow_untested=config.allow_untested)
    if tensor is not None:
        check_split(architecture, read_config(files.directory), tensor.size)
    dtype = choose_dtype(config, files, device)
    stage.ends = end_costs(whole_entries(files))
    _check_fits(files, dtype, stage, device, 1 if tensor is None else tensor.size)
    register_attention(ATTENTION_NAME, paged_attention)
    with silent(progress):
        module, splits = load_stage(
            files.directory, architecture, stage, dtype=dtype, attention=ATTENTION_NAME, device=device, tensor=tensor,
            blank=_blank(files),
        )  # fmt: skip
    kv_shapes = _kv_shapes(module, tensor)
    if tensor is not None:
        share_out(module, module.tp_plan, tensor)
    text = text_config(module)
    loaded = LoadedModel(
        module=module,
        architecture=architecture,
        dtype=dtype,
        device=device,
        kv_shapes=kv_shapes,
        vocab_size=int(text.vocab_size),
        max_model_len=_max_model_len(config, text),
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        shard=whole if tensor is None else partial(_part, tensor, splits),
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


def _blank(files: ModelFiles) -> dict[str, torch.Tensor] | None:
    """Zeros that take no memory, by name, in place of the ranks' files of a sharded state; see ``store``."""
    state = read_index(files.directory)
    return None if state is None else {name: torch.zeros(()).expand(shape) for name, shape in state.shapes.items()}


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


def _check_fits(files: ModelFiles, dtype: torch.dtype, stage: Stage, device: torch.device, tp_size: int) -> None:
    entries = whole_entries(files)
    num_layers = 1 + max((entry.layer for entry in entries if entry.layer is not None), default=0)
    own = None if stage.size == 1 else stage.layers(num_layers)
    need = num_elements(entries, own) * dtype.itemsize
    if device.type == "cpu" and can_pack(dtype) and files.config.get("tie_word_embeddings"):
        # Packing gives a tied head a copy of its own.
        need += max((entry.num_elements for entry in entries if entry.layer is None), default=0) * dtype.itemsize
    need //= tp_size
    have = free_bytes(device) // (tp_size if device.type == "cpu" else 1)  # they share the host's
    if need > have:
        raise OutOfMemory(
            f"loading {files.name} in {str(dtype).removeprefix('torch.')} on {device}", need, have,
            "take a smaller dtype or model, or more ranks",
        )  # fmt: skip


def _max_model_len(config: ModelConfig, text: Any) -> int:
    own = int(text.max_position_embeddings)
    if config.max_model_len is not None and config.max_model_len > own:
        raise ConfigError(
            f"ModelConfig.max_model_len is {config.max_model_len}: expected at most {own}, the positions of {config.model}"
        )
    return config.max_model_len or own


def _part(tensor: TensorGroup, splits: dict[str, Split], name: str, weight: Tensor) -> Tensor:
    return tensor.part(weight, splits[name]) if name in splits else weight


def _kv_shapes(module: Any, tensor: TensorGroup | None) -> dict[int, KVShape]:
    text = text_config(module)
    num_heads: int = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if tensor is not None:
        num_heads = kv_heads_per_rank(module.tp_plan, num_heads, tensor.size) or 0
        assert num_heads, "check_split has refused what cannot be shared out"
    return {layer: KVShape(num_heads, _head_dim(attention, text)) for layer, attention in attention_modules(module)}


def _head_dim(attention: Any, text: Any) -> int:
    head_dim = getattr(attention, "head_dim", None) or getattr(text, "head_dim", None)
    return int(head_dim or text.hidden_size // text.num_attention_heads)


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
