"""Headers of safetensors files."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from aexec.errors import ModelLoadError
from aexec.model.sources.checkpoint import TensorEntry, end_costs, num_elements, read_headers


@pytest.fixture
def checkpoint(tmp_path):
    """One file with two layers, an embedding and metadata."""
    path = tmp_path / "model.safetensors"
    tensors = {
        "model.embed_tokens.weight": torch.zeros(10, 4),
        "model.layers.0.up.weight": torch.zeros(3, 4, dtype=torch.bfloat16),
        "model.layers.11.up.weight": torch.zeros(7),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def test_headers_tell_names_shapes_and_layers(checkpoint) -> None:
    """Without a look at the weights; metadata is no tensor."""
    entries = sorted(read_headers([checkpoint]), key=lambda entry: entry.name)
    assert entries == [
        TensorEntry("model.embed_tokens.weight", "F32", (10, 4)),
        TensorEntry("model.layers.0.up.weight", "BF16", (3, 4)),
        TensorEntry("model.layers.11.up.weight", "F32", (7,)),
    ]
    assert [entry.layer for entry in entries] == [None, 0, 11]


def test_a_stage_counts_its_own_layers_and_all_that_is_outside_of_layers(checkpoint) -> None:
    """So that the estimate errs upwards."""
    entries = read_headers([checkpoint])
    assert num_elements(entries) == 40 + 12 + 7
    assert num_elements(entries, range(5, 12)) == 40 + 7


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (b"", "is no safetensors file: its header would take 0 bytes"),
        (b"\xff" * 64, "is no safetensors file"),
        ((5).to_bytes(8, "little") + b"{nope", "is damaged: its header cannot be read"),
        ((12).to_bytes(8, "little") + b'{"a": {"b":1}}'[:12], "is damaged"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path, contents, words) -> None:
    """With its name."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(contents)
    with pytest.raises(ModelLoadError, match=f"model.safetensors {words}"):
        read_headers([path])


def test_a_file_that_was_cut_short_is_refused(checkpoint) -> None:
    """Its header speaks of more bytes than there are."""
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    with pytest.raises(ModelLoadError, match=r"is cut short: it has .* bytes and its header speaks of"):
        read_headers([checkpoint])


def test_the_ends_of_a_model_are_measured_in_layers(checkpoint) -> None:
    """The table of tokens against the mean layer: all of it for the head, half for the embedding."""
    assert end_costs(read_headers([checkpoint])) == pytest.approx((40 / 9.5 / 2, 40 / 9.5))


def test_a_checkpoint_without_layers_has_free_ends() -> None:
    """There is nothing to measure them in."""
    assert end_costs([]) == (0.0, 0.0)
