"""In how many parts the layers of a model can be split, found out before anything is loaded."""

from __future__ import annotations

from typing import Any

from aexec.errors import ConfigError, UnsupportedModel
from aexec.model.transformer.hooks import kv_heads_per_rank
from aexec.model.transformer.shards import STYLES

__all__ = ("check_split",)

# Of the architectures that we support; tests/model/transformer/test_tensor_parallel.py runs all of them.
_WITH_PLAN = (
    "GPTNeoXForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


def check_split(architecture: str, config: Any, size: int) -> None:
    """Refuse a tensor-parallel size that the model cannot have.

    Args:
        architecture: Name of the model's class.
        config: Its configuration, with ``base_model_tp_plan``.
        size: Ranks that are to share each layer.

    Raises:
        UnsupportedModel: ``transformers`` has no plan for it, or one that we do not run.
        ConfigError: Its key/value heads cannot be dealt out evenly.
    """
    plan: dict[str, str] = config.base_model_tp_plan or {}
    if not plan:
        raise UnsupportedModel(
            f"tensor_parallel_size is {size}, and transformers has no tensor-parallel plan for {architecture}: "
            f"take pipeline_parallel_size, or a model of {', '.join(_WITH_PLAN)}"
        )
    unknown = sorted(set(plan.values()) - STYLES.keys())
    if unknown:
        raise UnsupportedModel(
            f"tensor_parallel_size is {size}, and {architecture} wants layers split by {', '.join(unknown)}: "
            f"expected {', '.join(sorted(STYLES))}; take pipeline_parallel_size"
        )
    # The attention heads are a multiple of these in every architecture, so they divide as well.
    heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if kv_heads_per_rank(plan, heads, size) is None:
        possible = ", ".join(str(each) for each in range(1, heads + 1) if heads % each == 0)
        raise ConfigError(
            f"tensor_parallel_size is {size}, and this {architecture} has {heads} key/value heads, which are dealt out "
            f"evenly and never doubled: expected one of {possible}"
        )
