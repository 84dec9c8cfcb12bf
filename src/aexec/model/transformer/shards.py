"""Layers of which each rank of a tensor-parallel group holds a part.

``transformers`` has a plan for each architecture: which layers are split, and along which
side. It reads the weights by that plan, so that no more than a rank's part is ever in memory.
Running them is ours: the parts become plain local weights, with the one exchange around them
that their style asks for. Layers that are split along their output need none, as the next
one is split along its input; so each attention and each MLP costs one sum.

Because a part is a plain ``nn.Linear``, it can be packed like any other (see ``packed``).

Source: transformers 5.24, ``distributed/tensor_parallel.py``, for what the styles mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from aexec.errors import UnsupportedModel
from aexec.parallel.tensor import TensorGroup

__all__ = ("STYLES", "JoinedLinear", "SummedEmbedding", "SummedLayer", "share_out", "whole_name")

_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_SHARD = ".shard."


class SummedLayer(nn.Module):
    """A layer whose whole output is the sum of what its parts give, as one split along its input."""

    def __init__(self, shard: nn.Module, group: TensorGroup, *, columns: range | None = None) -> None:
        """Wrap a part.

        Args:
            shard: This rank's part.
            group: Who has the others.
            columns: Which columns of the input it takes; None: the input comes split already.
        """
        super().__init__()
        self.shard, self._group = shard, group
        self._columns = None if columns is None else slice(columns.start, columns.stop)

    def forward(self, inputs: Tensor, *others: Any) -> Tensor:
        """The whole output, the same on all ranks."""
        if self._columns is not None:
            inputs = inputs[..., self._columns].contiguous()
        return self._group.sum(self.shard(inputs, *others))


class JoinedLinear(nn.Module):
    """A linear layer that is split along its output, and whose whole output is needed.

    Attributes:
        on_first: Only the first rank of the group needs it, as the one that samples.
    """

    def __init__(self, shard: nn.Linear, group: TensorGroup, *, out_features: int) -> None:
        """Wrap a part.

        Args:
            shard: This rank's part.
            group: Who has the others.
            out_features: Of the whole layer.
        """
        super().__init__()
        self.shard, self._group, self.out_features = shard, group, out_features
        self.on_first = False

    def forward(self, inputs: Tensor) -> Tensor:
        """Shape ``[..., out_features]``; ``[..., 0]`` on ranks that do not need it."""
        join = self._group.joined_on_first if self.on_first else self._group.joined
        return join(self.shard(inputs), self.out_features)


class SummedEmbedding(nn.Module):
    """An embedding of which this rank has some rows; tokens of other ranks are zero here."""

    def __init__(self, shard: nn.Embedding, group: TensorGroup, *, rows: range) -> None:
        super().__init__()
        self.shard, self._group, self._rows = shard, group, rows

    def forward(self, token_ids: Tensor) -> Tensor:
        """Shape ``[...]`` to ``[..., hidden_size]``, the same on all ranks."""
        others = (token_ids < self._rows.start) | (token_ids >= self._rows.stop)
        part: Tensor = self.shard((token_ids - self._rows.start).masked_fill(others, 0))
        return self._group.sum(part.masked_fill_(others[..., None], 0))


def share_out(model: Any, plan: Mapping[str, str], group: TensorGroup) -> None:
    """Put the exchanges of ``plan`` around the layers of a model whose weights are this rank's parts.

    Args:
        model: With local weights; its modules still have the sizes of the whole.
        plan: Style by name; ``*`` stands for the number of a layer.
        group: The ranks that have the other parts.

    Raises:
        UnsupportedModel: A style is not one of :data:`STYLES`.
    """
    for name, module in list(model.named_modules()):
        style = plan.get(_LAYER_NUMBER.sub(".*", name))
        if style is None or not any(True for _ in module.parameters()):  # without weights: another stage has it
            continue
        if style not in STYLES:
            known = ", ".join(sorted(STYLES))
            raise UnsupportedModel(f"{type(model).__name__} wants {name} split by {style!r}: expected one of {known}")
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, STYLES[style](module, group))
    head = model.get_output_embeddings()
    if isinstance(head, JoinedLinear):
        head.on_first = True


def whole_name(name: str) -> str:
    """The name that a checkpoint has for a parameter of a model that was shared out."""
    return name.replace(_SHARD, ".")


def _plain(layer: nn.Module, _group: TensorGroup) -> nn.Module:
    """Split along its output or not at all: nothing to exchange."""
    return _resized(layer) if isinstance(layer, nn.Linear) else layer


def _joined(layer: nn.Linear, group: TensorGroup) -> nn.Module:
    out_features = layer.out_features
    return JoinedLinear(_resized(layer), group, out_features=out_features)


def _summed(layer: nn.Module, group: TensorGroup, *, takes_whole: bool = False) -> nn.Module:
    if not isinstance(layer, nn.Linear):
        return SummedLayer(layer, group)
    columns = group.share(layer.in_features) if takes_whole else None
    if group.rank != 0:
        layer.register_parameter("bias", None)  # it is added once
    return SummedLayer(_resized(layer), group, columns=columns)


def _embedding(layer: nn.Embedding, group: TensorGroup) -> nn.Module:
    rows = group.share(layer.num_embeddings)
    layer.num_embeddings, layer.padding_idx = len(rows), None
    return SummedEmbedding(layer, group, rows=rows)


def _resized(linear: nn.Linear) -> nn.Linear:
    linear.out_features, linear.in_features = linear.weight.shape
    return linear


# By transformers' names. Those of parameters only (as ``packed_colwise`` of experts) need no entry of their own: what
# holds such parameters has a style too.
STYLES: dict[str, Callable[[Any, TensorGroup], nn.Module]] = {
    "colwise": _plain,
    "colwise_gather_output": _joined,
    "embedding_rowwise": _embedding,
    "moe_tp_experts": _summed,
    "packed_colwise": _plain,
    "replicated_with_grad_allreduce": _plain,
    "rowwise": _summed,
    "rowwise_split_input": partial(_summed, takes_whole=True),
}
