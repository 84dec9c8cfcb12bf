"""Linear layers with weights in the layout that oneDNN's kernels like best, on CPUs.

``nn.Linear`` keeps its weight row by row and has a BLAS library walk over it; a decode step
does that for every weight of the model with one row per request of input. oneDNN reads a
weight that was reordered once into tiles two to three times faster, in float32 as in
bfloat16. Layers that read the same input (query, key and value; gate and up) become one
matrix, since each product costs a rendezvous of all threads. Model code is none the wiser:
each layer keeps its name and its meaning, and results agree with ``nn.Linear``'s to the last
digits (another order of summation).

The operators are torch's own, the ones behind its compiled CPU models; where a build of
torch lacks them, layers stay as they are.

Source: torch 2.13, ``torch/_inductor/mkldnn_lowerings.py`` (``mkldnn::_linear_pointwise``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ("PackedLinear", "PackedProduct", "can_pack", "pack_linears")

# The number of input rows that oneDNN is told to choose its tiles for; one layout serves all
# batch sizes, and this one was the best or as good for any number from 1 to 512.
_ROWS_HINT = 64
# Layers of one module that read the same input, by the names that transformers gives them.
# A name that means something else somewhere costs speed there, not correctness.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_ops = torch.ops.mkldnn
_backend: Any = torch.backends.mkldnn


class PackedProduct:
    """One packed matrix behind one or more layers.

    The first layer that is given a new input computes for all; the others, given the very
    same tensor, take what is there. Nothing is kept once all have taken their part.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        """Pack the rows of ``linears``, which have one input size, and all a bias or none."""
        biases: list[Any] = [linear.bias for linear in linears]  # None is possible, whatever torch's annotation says
        weight = _joined([linear.weight.detach() for linear in linears])
        self.sizes = [linear.out_features for linear in linears]
        self.shape, self.dtype = weight.shape, weight.dtype
        self._packed: Tensor | None = _pack(weight)
        self._bias = None if biases[0] is None else _joined([bias.detach() for bias in biases])
        self._inputs: Tensor | None = None
        self._parts: list[Tensor | None] = []

    @property
    def nbytes(self) -> int:
        """What the packed matrix takes; 0 when it was dropped."""
        return 0 if self._packed is None else self.shape.numel() * self.dtype.itemsize

    def weights(self) -> list[Tensor] | None:
        """Dense copies of the layers' weights, ``[sizes[i], in_features]``; None when they were dropped."""
        if self._packed is None:
            return None
        return list(torch.split_with_sizes(self._packed.to_dense(), self.sizes))

    def biases(self) -> list[Tensor] | None:
        """Views of the layers' biases, ``[sizes[i]]``; None when they have none."""
        return None if self._bias is None else list(torch.split_with_sizes(self._bias, self.sizes))

    def replace(self, weights: Sequence[Tensor]) -> None:
        """Pack other weights, one for each layer, in the dtype of the first ones."""
        self._packed = None  # before the new one is made: there is no need to hold both
        self._packed = _pack(_joined(weights))

    def drop(self) -> None:
        """Let the weights go; biases, which are small, stay."""
        self._packed = None

    def part(self, index: int, inputs: Tensor) -> Tensor:
        """Shape ``[..., in_features]`` to ``[..., sizes[index]]``."""
        if len(self.sizes) == 1:
            return self._product(inputs)
        part = self._parts[index] if inputs is self._inputs else None
        if part is None:
            self._inputs, self._parts = inputs, list(torch.split_with_sizes(self._product(inputs), self.sizes, -1))
            part = self._parts[index]
            assert part is not None, "it was made in the line before"
        self._parts[index] = None
        if not any(each is not None for each in self._parts):
            self._inputs = None
        return part

    def _product(self, inputs: Tensor) -> Tensor:
        out: Tensor = _ops._linear_pointwise(inputs, self._packed, self._bias, "none", [], "")  # noqa: SLF001  # see above
        return out


class PackedLinear(nn.Module):
    """``x @ weight.T + bias``, a part of a :class:`PackedProduct`.

    Attributes:
        in_features: Size of the last dimension of the input.
        out_features: Size of the last dimension of the output.
        product: The matrix.
        index: Which part of it.
    """

    def __init__(self, linear: nn.Linear, product: PackedProduct, index: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.product, self.index = product, index

    def forward(self, inputs: Tensor) -> Tensor:
        """Shape ``[..., in_features]`` to ``[..., out_features]``."""
        return self.product.part(self.index, inputs)

    def extra_repr(self) -> str:
        """As ``nn.Linear`` prints itself, and how many layers share the product."""
        return f"in_features={self.in_features}, out_features={self.out_features}, shared={len(self.product.sizes)}"


def can_pack(dtype: torch.dtype) -> bool:
    """True when this build of torch and this CPU gain from packed weights of ``dtype``."""
    if not _backend.is_available() or not hasattr(_ops, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(_ops._is_mkldnn_bf16_supported())  # noqa: SLF001  # see above
    return dtype == torch.float32


def pack_linears(model: nn.Module, on_packed: Callable[[int], None]) -> int:
    """Replace every plain ``nn.Linear`` of ``model``; each dense weight is let go at once.

    Args:
        model: On a CPU, in a dtype that :func:`can_pack` allows.
        on_packed: Told the number of bytes after each product.

    Returns:
        How many layers were replaced.
    """
    products = list(_products(model))
    for parent, names in products:
        linears: list[nn.Linear] = [getattr(parent, name) for name in names]
        product = PackedProduct(linears)
        for index, (name, linear) in enumerate(zip(names, linears, strict=True)):
            setattr(parent, name, PackedLinear(linear, product, index))
        on_packed(sum(linear.weight.nbytes for linear in linears))
    return sum(len(names) for _, names in products)


def _products(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """Parents and names, not the layers: holding these would keep every dense weight until the end."""
    for parent in model.modules():
        plain = {name: child for name, child in parent.named_children() if type(child) is nn.Linear}
        for siblings in _SIBLINGS:
            found = [plain[name] for name in siblings if name in plain]
            if len(found) == len(siblings) and _fit(found):
                yield parent, siblings
                plain = {name: child for name, child in plain.items() if name not in siblings}
        for name in plain:
            yield parent, (name,)


def _fit(linears: Sequence[nn.Linear]) -> bool:
    has_bias: set[bool] = {"bias" in dict(linear.named_parameters()) for linear in linears}
    return len(has_bias) == 1 and len({(linear.in_features, linear.weight.dtype) for linear in linears}) == 1


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = _ops._reorder_linear_weight(weight, _ROWS_HINT)  # noqa: SLF001  # see above
    return packed


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
