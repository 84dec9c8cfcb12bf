"""The corner that leans on private parts of transformers."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from aexec.errors import ModelLoadError
from aexec.model.transformer.hooks import Stage, model_class_name, silent


@pytest.mark.parametrize("num_layers", [4, 5, 30])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_stages_share_the_layers_without_gap_or_overlap(num_layers, size) -> None:
    """Every layer has one owner, in order, and no stage has two more than another."""
    shares = [list(Stage(rank, size).layers(num_layers)) for rank in range(size)]
    assert [layer for share in shares for layer in share] == list(range(num_layers))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_stage_knows_its_ends() -> None:
    """The first embeds, the last has the head; a whole model is both."""
    assert [(Stage(rank, 3).is_first, Stage(rank, 3).is_last) for rank in range(3)] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    assert Stage().is_first
    assert Stage().is_last
    assert repr(Stage(1, 3)) == "<Stage 1 of 3>"


def test_a_model_without_a_list_of_layers_cannot_be_cut() -> None:
    """It says so, instead of leaving all layers on every stage."""
    model = nn.Module()
    model.body = nn.Sequential(nn.Linear(2, 2))
    text = SimpleNamespace(num_hidden_layers=3, tie_word_embeddings=False)
    model.config, model.base_model_prefix = SimpleNamespace(get_text_config=lambda: text), "body"
    with pytest.raises(ModelLoadError, match=r"keeps its 3 layers in no list"):
        Stage(0, 2).cut(model)


def test_model_classes_go_by_model_type() -> None:
    """As config.json names it; what transformers does not know has none."""
    assert model_class_name("llama") == "LlamaForCausalLM"
    assert model_class_name("no_such_type") is None


def test_the_first_bar_becomes_progress_and_nothing_is_printed(capfd) -> None:
    """Bars are counted for a callback; warnings and log lines go nowhere."""
    seen: list[tuple[str, float, float]] = []
    with silent(lambda *told: seen.append(told), "weights"):
        for _ in transformers_logging.tqdm(range(2), desc="reading"):
            pass
        with transformers_logging.tqdm(total=9) as second:
            second.update(9)
            second.set_postfix(a=1)
        transformers_logging.get_logger("transformers.test").warning("chatter")
        warnings.warn("chatter", FutureWarning, stacklevel=1)
    assert seen == [("weights", 1.0, 2.0), ("weights", 2.0, 2.0)]
    assert capfd.readouterr() == ("", "")


def test_transformers_settings_are_put_back() -> None:
    """Also when loading fails: they are global, and not ours."""
    verbosity = transformers_logging.get_verbosity()
    hook = transformers_logging.set_tqdm_hook(None)
    try:
        with pytest.raises(RuntimeError, match=r"no"), silent():
            raise RuntimeError("no")
        assert transformers_logging.get_verbosity() == verbosity
        assert transformers_logging.set_tqdm_hook(None) is None
    finally:
        transformers_logging.set_tqdm_hook(hook)
    assert torch.is_grad_enabled()
