"""Linear layers with weights in the layout that oneDNN's kernels like best, on CPUs.

``nn.Linear`` keeps its weight row by row and has a BLAS library walk over it; a decode step
does that for every weight of the model with one row per request of input. oneDNN reads a
weight that was reordered once into tiles two to three times faster, in float32 as in
bfloat16. Model code is none the wiser: the layer keeps its name and its meaning, and results
agree with ``nn.Linear``'s to the last digits (another order of summation).

The operators are torch's own, the ones behind its compiled CPU models; where a build of
torch lacks them, layers stay as they are.

Source: torch 2.13, ``torch/_inductor/mkldnn_lowerings.py`` (``mkldnn::_linear_pointwise``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ("PackedLinear", "can_pack", "pack_linears")

# The number of input rows that oneDNN is told to choose its tiles for; one layout serves all
# batch sizes, and this one was the best or as good at 1, 8 and 64 rows alike.
_ROWS_HINT = 8
_ops = torch.ops.mkldnn
_backend: Any = torch.backends.mkldnn


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` over a weight that was packed once.

    Attributes:
        in_features: Size of the last dimension of the input.
        out_features: Size of the last dimension of the output.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self._packed: Tensor = _ops._reorder_linear_weight(weight, _ROWS_HINT)  # noqa: SLF001  # see above
        bias: Any = linear.bias  # None is possible, whatever torch's annotation says
        self._bias: Tensor | None = None if bias is None else bias.detach()

    def forward(self, inputs: Tensor) -> Tensor:
        """Shape ``[..., in_features]`` to ``[..., out_features]``."""
        out: Tensor = _ops._linear_pointwise(inputs, self._packed, self._bias, "none", [], "")  # noqa: SLF001  # see above
        return out

    def extra_repr(self) -> str:
        """As ``nn.Linear`` prints itself."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self._bias is not None}"


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
        on_packed: Told the number of bytes after each layer.

    Returns:
        How many layers were replaced.
    """
    places = list(_plain_linears(model))
    for parent, name in places:
        linear: nn.Linear = getattr(parent, name)
        setattr(parent, name, PackedLinear(linear))
        on_packed(linear.weight.nbytes)
    return len(places)


def _plain_linears(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Parents and names, not the layers: holding these would keep every dense weight until the end."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                yield parent, name
