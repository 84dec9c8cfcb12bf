"""Packed linear layers: the same function over another layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from aexec.model.packed import PackedLinear, can_pack, pack_linears

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = [dtype for dtype in TOLERANCE if can_pack(dtype)]


def linear(inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 8, 70])
def test_a_packed_layer_computes_what_the_plain_one_does(dtype, bias, rows) -> None:
    """For any number of rows, with and without a bias, to within the rounding of its dtype."""
    plain = linear(96, 160, dtype, bias=bias)
    inputs = torch.randn(1, rows, 96, dtype=dtype)
    with torch.inference_mode():
        expected, found = plain(inputs), PackedLinear(plain)(inputs)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_float32_can_be_packed() -> None:
    """The CPU build of torch that we are tested with has the operators; the gain in speed rests on it."""
    assert torch.float32 in DTYPES
    assert not can_pack(torch.float64)


def test_packing_keeps_names_and_lets_dense_weights_go() -> None:
    """Layers are replaced under their names; tied embeddings and other modules stay."""
    model = nn.ModuleDict({"up": nn.Linear(8, 16), "norm": nn.LayerNorm(16), "inner": nn.Sequential(nn.Linear(16, 8))})
    sizes: list[int] = []
    with torch.inference_mode():
        assert pack_linears(model, sizes.append) == 2
    assert sizes == [8 * 16 * 4, 16 * 8 * 4]
    assert isinstance(model["up"], PackedLinear)
    assert isinstance(model["inner"][0], PackedLinear)
    assert [name for name, _ in model.named_parameters()] == ["norm.weight", "norm.bias"]
    assert repr(model["up"]) == "PackedLinear(in_features=8, out_features=16, bias=True)"


def test_a_layer_of_its_own_kind_is_left_alone() -> None:
    """A subclass of nn.Linear may compute something else."""

    class Scaled(nn.Linear):
        pass

    model = nn.Sequential(Scaled(4, 4))
    assert pack_linears(model, print) == 0
    assert isinstance(model[0], Scaled)
