"""Which models can be split in how many parts."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from aexec.errors import ConfigError, UnsupportedModel
from aexec.model.transformer.hooks import model_class_name, read_config
from aexec.model.transformer.loader import SUPPORTED
from aexec.model.transformer.split import check_split
from aexec.testing.tiny_models import TINY_ARCHITECTURES

LLAMA_PLAN = {"layers.*.self_attn.k_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}


def config(kv_heads: int, plan: dict[str, str] | None) -> SimpleNamespace:
    return SimpleNamespace(num_attention_heads=9, num_key_value_heads=kv_heads, base_model_tp_plan=plan)


@pytest.mark.parametrize("size", [2, 4, 9])
def test_key_value_heads_are_never_doubled(size) -> None:
    """As SmolLM2 has it: three of them go to one rank or to three, and the error says so."""
    with pytest.raises(
        ConfigError,
        match=rf"tensor_parallel_size is {size}, and this LlamaForCausalLM has 3 key/value heads.*expected one of 1, 3$",
    ):
        check_split("LlamaForCausalLM", config(3, LLAMA_PLAN), size)
    check_split("LlamaForCausalLM", config(3, LLAMA_PLAN), 3)


def test_heads_that_are_joined_again_need_not_divide() -> None:
    """Phi3's fused projection is split along its rows, wherever that is, and joined before heads matter."""
    check_split("Phi3ForCausalLM", config(3, {"layers.*.self_attn.qkv_proj": "colwise_gather_output"}), 2)


def test_a_plan_with_a_style_that_we_do_not_run_is_refused() -> None:
    """It names the style and those that we do run; nothing is ever split by guess."""
    with pytest.raises(UnsupportedModel, match=r"layers split by mla_kv_a_proj: expected colwise, .*rowwise"):
        check_split("DeepseekV2ForCausalLM", config(2, {**LLAMA_PLAN, "layers.*.kv_a": "mla_kv_a_proj"}), 2)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_an_architecture_without_a_plan_is_refused(name, tiny_model) -> None:
    """It names the way out: stages, or another architecture."""
    with pytest.raises(
        UnsupportedModel, match=r"no tensor-parallel plan for Net: take pipeline_parallel_size, or a model of .*Llama"
    ):
        check_split("Net", read_config(tiny_model(name)), 2)


def test_the_error_names_just_the_architectures_that_can_be_split(tiny_model) -> None:
    """Of those that we support; the list is the one that transformers has plans for."""
    plans = {name: read_config(tiny_model(name)).base_model_tp_plan for name in TINY_ARCHITECTURES}
    with pytest.raises(UnsupportedModel) as caught:
        check_split("Net", config(2, None), 2)
    named = set(re.findall(r"\w+ForCausalLM", str(caught.value)))
    can = {model_class_name(read_config(tiny_model(name)).model_type) for name, plan in plans.items() if plan}
    assert named == can < SUPPORTED
