"""All weights of one rank's model by their names, however the model holds them.

A weight is a parameter of its own, or a part of a packed matrix (see ``packed``). Here each
can be read, replaced and dropped under the name that ``transformers`` gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from aexec.errors import ProtocolError
from aexec.model.transformer.packed import PackedLinear, PackedProduct
from aexec.model.transformer.shards import whole_name

__all__ = ("Shard", "Weights", "whole")

#: Takes a name and the tensor of the whole model to the slice that this rank holds.
Shard = Callable[[str, Tensor], Tensor]


def whole(name: str, tensor: Tensor) -> Tensor:  # noqa: ARG001  # a Shard's signature
    """The slice of a rank that shares its layers with nobody."""
    return tensor


@dataclass(slots=True, eq=False)
class _Matrix:
    """A packed matrix, and new weights of its layers that wait until all of them are there."""

    product: PackedProduct
    staged: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def stage(self, index: int, tensor: Tensor) -> None:
        self.staged[index] = tensor
        if len(self.staged) == len(self.product.sizes):
            self.pack()

    def pack(self) -> None:
        """Layers without a new weight keep what they have."""
        if not self.staged:
            return
        count = len(self.product.sizes)
        old = (self.product.weights() or []) if len(self.staged) < count else []
        self.product.replace([self.staged[index] if index in self.staged else old[index] for index in range(count)])
        self.staged.clear()

    def own(self) -> None:
        self.staged = {index: tensor.clone() for index, tensor in self.staged.items()}


@dataclass(frozen=True, slots=True)
class _Part:
    """The weight of one layer of a matrix."""

    matrix: _Matrix
    index: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.matrix.product.sizes[self.index], self.matrix.product.shape[1]))


class Weights:
    """Of one rank.

    Args:
        module: Its model.
        shard: Cuts this rank's slice out of a full tensor.
    """

    def __init__(self, module: nn.Module, shard: Shard = whole) -> None:
        self._shard = shard
        self._plain: dict[str, Tensor] = {
            whole_name(name): tensor for name, tensor in module.state_dict(keep_vars=True).items()
        }
        self._parts: dict[str, _Part] = {}
        self._matrices: list[_Matrix] = []
        self._find_packed(module)
        self._shapes = {name: tensor.shape for name, tensor in self._plain.items()}
        self._shapes |= {name: part.shape for name, part in self._parts.items()}
        self._on_host: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        return f"<Weights: {len(self.names)}, {self.nbytes / 2**20:,.1f} MiB>"

    @property
    def names(self) -> frozenset[str]:
        """Of this rank."""
        return frozenset(self._plain) | frozenset(self._parts)

    @property
    def nbytes(self) -> int:
        """Where the model runs: what is there now."""
        return sum(tensor.nbytes for tensor in self._parameters().values()) + sum(
            matrix.product.nbytes for matrix in self._matrices
        )

    @property
    def host_bytes(self) -> int:
        """Held in host memory while the weights sleep."""
        return sum(tensor.nbytes for tensor in self._on_host.values())

    @torch.inference_mode()
    def put(self, name: str, tensor: Tensor) -> None:
        """Replace a weight by this rank's slice of ``tensor``, in the model's own dtype.

        A part of a packed matrix may wait, as a view of ``tensor``, for the others; see :meth:`own_staged`.

        Raises:
            ProtocolError: The slice has another shape than the weight.
        """
        self.put_own(name, self._shard(name, tensor))

    @torch.inference_mode()
    def put_own(self, name: str, new: Tensor) -> None:
        """:meth:`put` of what is this rank's slice already."""
        part = self._parts.get(name)
        if new.shape != self._shapes[name]:
            raise ProtocolError(f"the slice of {name} is {list(new.shape)}: expected {list(self._shapes[name])}")
        if part is not None:
            part.matrix.stage(part.index, new.to(part.matrix.product.dtype))
            return
        old = self._plain[name]
        if old.shape == new.shape:
            old.copy_(new)
        else:
            old.data = new.to(device=old.device, dtype=old.dtype, copy=True).contiguous()

    @torch.inference_mode()
    def own_staged(self) -> None:
        """Copy what waits, so that nobody else's memory is needed any longer."""
        for matrix in self._matrices:
            matrix.own()

    @torch.inference_mode()
    def settle(self) -> None:
        """Pack what waits; layers without a new weight keep the one that they have."""
        for matrix in self._matrices:
            matrix.pack()

    @torch.inference_mode()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of this rank, packed ones as dense copies."""
        yield from self._plain.items()
        for name, part in self._parts.items():
            weights = part.matrix.product.weights()
            if weights is not None:
                yield name, weights[part.index].clone()  # not all of the matrix for each part of it

    @torch.inference_mode()
    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """What :meth:`tensors` gives, but each packed matrix is unpacked once only, under the name of its first layer."""
        yield from self._plain.items()
        first = {id(part.matrix): name for name, part in reversed(self._parts.items())}
        for matrix in self._matrices:
            for index, weight in enumerate(matrix.product.weights() or ()):
                yield f"{first[id(matrix)]} {index}", weight

    @torch.inference_mode()
    def drop(self) -> int:
        """Let all weights go; buffers and packed biases, which are small, stay. Returns bytes."""
        before = self.nbytes
        self._on_host.clear()
        for matrix in self._matrices:
            matrix.product.drop()
            matrix.staged.clear()
        for parameter in self._parameters().values():
            parameter.data = parameter.new_empty(0)
        return before - self.nbytes

    @torch.inference_mode()
    def offload(self) -> int:
        """Move parameters to host memory; what is in a packed matrix is there already. Returns bytes."""
        before = self.nbytes
        for name, parameter in self._parameters().items():
            if parameter.device.type != "cpu" and parameter.numel():
                self._on_host[name] = parameter.data.to("cpu")
                parameter.data = parameter.new_empty(0)
        return before - self.nbytes

    @torch.inference_mode()
    def restore(self) -> None:
        """Bring back what :meth:`offload` moved."""
        parameters = self._parameters()
        for name, tensor in self._on_host.items():
            parameters[name].data = tensor.to(parameters[name].device)
        self._on_host.clear()

    def _find_packed(self, module: nn.Module) -> None:
        matrices: dict[int, _Matrix] = {}
        whole_module: Any = module
        for path, layer in dict[str, nn.Module](whole_module.named_modules()).items():
            if not isinstance(layer, PackedLinear):
                continue
            matrix = matrices.setdefault(id(layer.product), _Matrix(layer.product))
            self._parts[whole_name(f"{path}.weight")] = _Part(matrix, layer.index)
            biases = layer.product.biases()
            if biases is not None:
                self._plain[whole_name(f"{path}.bias")] = biases[layer.index]
        self._matrices = list(matrices.values())

    def _parameters(self) -> dict[str, Tensor]:
        """Each once, be it tied or not."""
        found = {id(tensor): (name, tensor) for name, tensor in self._plain.items() if isinstance(tensor, nn.Parameter)}
        return dict(found.values())
