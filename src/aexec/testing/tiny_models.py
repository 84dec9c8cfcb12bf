"""Tiny random models of every architecture that the model runner supports.

They have a few hundred thousand parameters, are made in milliseconds from a seed, and are
saved in Hugging Face's layout. Their weights are drawn wide (``initializer_range=0.2``):
with the usual 0.02 a random model says the same token for ever, and equal outputs would
prove little.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ("TINY_ARCHITECTURES", "save_tiny_model")

_ENDS: dict[str, int] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZES: dict[str, int] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    **_ENDS,
}
_MOST: dict[str, int] = {**_SIZES, "intermediate_size": 128, "num_key_value_heads": 4}
_GROUPED: dict[str, int] = {**_MOST, "num_key_value_heads": 2}
_GEMMA: dict[str, int] = {**_GROUPED, "head_dim": 16}
_SLIDING: dict[str, int] = {**_GEMMA, "sliding_window": 16, "query_pre_attn_scalar": 16}

# Name: configuration class of transformers, and what it is given.
TINY_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _MOST),
    "llama_gqa": ("LlamaConfig", _GROUPED),
    "qwen2": ("Qwen2Config", _GROUPED),
    "qwen3": ("Qwen3Config", {**_GROUPED, "head_dim": 16}),
    "mistral": ("MistralConfig", {**_GROUPED, "sliding_window": 16}),
    "gemma": ("GemmaConfig", _GEMMA),
    "gemma2": ("Gemma2Config", _SLIDING),
    "gemma3": ("Gemma3TextConfig", {**_SLIDING, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "phi": ("PhiConfig", _MOST),
    "phi3": ("Phi3Config", _GROUPED),
    "gpt2": ("GPT2Config", {"vocab_size": 512, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512, **_ENDS}),
    "opt": ("OPTConfig", {**_SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "gpt_neox": ("GPTNeoXConfig", {**_SIZES, "intermediate_size": 128}),
    "mixtral": ("MixtralConfig", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def save_tiny_model(name: str, directory: str | Path, *, seed: int = 0, **changes: Any) -> Path:
    """Make a tiny model and save it.

    Args:
        name: A key of :data:`TINY_ARCHITECTURES`.
        directory: Where to; made if it is not there.
        seed: Of the weights. The global random state is left as it was.
        changes: Other values of its configuration.

    Returns:
        ``directory``.
    """
    import torch
    import transformers

    from aexec.model.transformer.hooks import silent

    class_name, settings = TINY_ARCHITECTURES[name]
    config = getattr(transformers, class_name)(**{**settings, **changes})
    for width in ("initializer_range", "init_std"):
        if hasattr(config, width):
            setattr(config, width, 0.2)
    auto: Any = transformers.AutoModelForCausalLM
    random: Any = torch.random
    with silent(), random.fork_rng(devices=[]):
        random.manual_seed(seed)
        auto.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return Path(directory)
