"""Packed linear layers: the same function over another layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from aexec.model.transformer.packed import PackedLinear, PackedProduct, can_pack, pack_linears

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
        expected, found = plain(inputs), PackedLinear(plain, PackedProduct([plain]), 0)(inputs)
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
    assert repr(model["up"]) == "PackedLinear(in_features=8, out_features=16, shared=1)"


def test_a_layer_of_its_own_kind_is_left_alone() -> None:
    """A subclass of nn.Linear may compute something else."""

    class Scaled(nn.Linear):
        pass

    model = nn.Sequential(Scaled(4, 4))
    assert pack_linears(model, print) == 0
    assert isinstance(model[0], Scaled)


class Attention(nn.Module):
    """Three layers that read the same input, in a module that lets them."""

    def __init__(self, *, bias: tuple[bool, bool, bool] = (True, True, True)) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(16, size, bias=has) for size, has in zip((16, 8, 8), bias, strict=True)
        )
        self.o_proj = nn.Linear(16, 16)
        self.requires_grad_(False)

    def forward(self, inputs: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.q_proj(inputs), self.k_proj(inputs), self.v_proj(others), self.o_proj(inputs)


def products(model: nn.Module) -> set[int]:
    return {id(child.product) for child in model.modules() if isinstance(child, PackedLinear)}


@pytest.mark.parametrize("same", [True, False])
@torch.inference_mode()
def test_layers_that_read_one_input_are_one_product(same) -> None:
    """Given the same tensor they share the work, given another one they do not; the results are right both times."""
    model = Attention()
    inputs = torch.randn(1, 3, 16)
    others = inputs if same else torch.randn(1, 3, 16)
    expected = model(inputs, others)
    assert pack_linears(model, lambda _: None) == 4
    assert len(products(model)) == 2
    for _ in range(2):
        torch.testing.assert_close(model(inputs, others), expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_a_shared_product_keeps_nothing_once_all_have_taken_their_part() -> None:
    """Else each layer of a model would hold the activations of its last step."""
    model = Attention()
    pack_linears(model, lambda _: None)
    inputs = torch.randn(1, 3, 16)
    product = model.q_proj.product
    model.q_proj(inputs)
    assert product._inputs is inputs
    model.k_proj(inputs)
    model.v_proj(inputs)
    assert product._inputs is None
    assert product._parts == [None, None, None]


@torch.inference_mode()
def test_an_input_that_was_changed_in_place_is_new_once_it_was_used_up() -> None:
    """The next step may write its input into the same memory."""
    model = Attention()
    plain = Attention()
    pack_linears(model, lambda _: None)
    inputs = torch.zeros(1, 3, 16)
    model(inputs, inputs)
    inputs += 1
    torch.testing.assert_close(model(inputs, inputs), plain(inputs, inputs), rtol=1e-5, atol=1e-5)


def test_layers_that_do_not_fit_together_stay_apart() -> None:
    """One with a bias and one without make no common product."""
    model = Attention(bias=(True, False, True))
    pack_linears(model, lambda _: None)
    assert len(products(model)) == 4
