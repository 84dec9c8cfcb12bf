"""What the ranks that share each layer have to say to each other: sums and joined rows.

Each of them runs the same forward pass over its own part of every weight. All take part in
every exchange, in the same order; what comes out of a sum has the same bits on all of them,
which is what lets each go on by itself (route to the same experts, above all).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from aexec.errors import ConfigError, PeerLost
from aexec.parallel.groups import distributed, first_line

__all__ = ("Split", "TensorGroup")


class Split(NamedTuple):
    """Along which side a weight is shared out.

    Attributes:
        dim: Of the tensor.
        groups: Matrices that lie side by side in it, each of which is shared out for itself.
    """

    dim: int
    groups: int = 1


class TensorGroup:
    """A tensor-parallel group, as one of its ranks sees it.

    Args:
        process_group: Of ``torch.distributed``.
        named: What errors call this rank; None: as the world does.

    Attributes:
        rank: Place in the group.
        size: Ranks of the group.
        process_group: Of ``torch.distributed``; its timeout is the deadline of every exchange.
    """

    def __init__(self, process_group: Any, named: int | None = None) -> None:
        self.process_group = process_group
        self.rank: int = distributed.get_rank(process_group)
        self.size: int = distributed.get_world_size(process_group)
        self._named: int = distributed.get_rank() if named is None else named

    @classmethod
    def checked(cls, process_group: Any, rank: int, size: int, named: int | None = None) -> TensorGroup:
        """The group in which this rank has the place that its layout says.

        Raises:
            ConfigError: There is no group, or it is another one.
        """
        if process_group is None:
            raise ConfigError(
                f"tensor_parallel_size is {size}, and the model runner was given no process group to share layers "
                "with: call join() before load_model()"
            )
        group = cls(process_group, named)
        if (group.rank, group.size) != (rank, size):
            raise ConfigError(
                f"the process group has this rank as {group.rank} of {group.size}: expected {rank} of {size}, "
                "by tensor_parallel_size and the rank's place"
            )
        return group

    def __repr__(self) -> str:
        return f"<TensorGroup: {self.rank} of {self.size}>"

    def share(self, size: int) -> range:
        """Which of ``size`` rows or columns are this rank's; the last ranks have fewer when it does not divide."""
        each = -(-size // self.size)
        return range(min(size, each * self.rank), min(size, each * (self.rank + 1)))

    def part(self, whole: Tensor, split: Split) -> Tensor:
        """This rank's part of a weight."""
        parts: list[Tensor] = []
        for each in whole.chunk(split.groups, split.dim):
            share = self.share(each.shape[split.dim])
            parts.append(each.narrow(split.dim, share.start, len(share)))
        return parts[0] if split.groups == 1 else torch.cat(parts, split.dim)

    def sum(self, part: Tensor) -> Tensor:
        """Add up the ranks' tensors of one shape; ``part`` may be overwritten.

        Raises:
            PeerLost: A rank of the group is gone or too late.
        """
        part = part.contiguous()
        try:
            distributed.all_reduce(part, group=self.process_group)
        except RuntimeError as error:
            raise self._lost("add up", error) from error
        return part

    def joined(self, part: Tensor, size: int) -> Tensor:
        """All ranks' shares ``[..., len(share(size))]`` side by side, ``[..., size]``, on all ranks.

        Raises:
            PeerLost: A rank of the group is gone or too late.
        """
        part = self._padded(part, size)
        parts = [torch.empty_like(part) for _ in range(self.size)]
        try:
            distributed.all_gather(parts, part, group=self.process_group)
        except RuntimeError as error:
            raise self._lost("join", error) from error
        return torch.cat(parts, -1)[..., :size]

    def joined_on_first(self, part: Tensor, size: int) -> Tensor:
        """As :meth:`joined` on the first rank of the group; the others get ``[..., 0]``.

        Raises:
            PeerLost: A rank of the group is gone or too late.
        """
        part = self._padded(part, size)
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else None
        try:
            distributed.gather(part, parts, group=self.process_group, group_dst=0)
        except RuntimeError as error:
            raise self._lost("join", error) from error
        return torch.cat(parts, -1)[..., :size] if parts else part[..., :0]

    def told_by_first(self, numbers: list[int]) -> list[int]:
        """The integers of the first rank of the group, on all ranks; each brings as many.

        Raises:
            PeerLost: A rank of the group is gone or too late.
        """
        words: Any = torch.tensor(numbers, dtype=torch.int64)
        try:
            distributed.broadcast(words, group=self.process_group, group_src=0)
        except RuntimeError as error:
            raise self._lost("tell the tokens of", error) from error
        told: list[int] = words.tolist()
        return told

    def _padded(self, part: Tensor, size: int) -> Tensor:
        missing = -(-size // self.size) - part.shape[-1]
        return (F.pad(part, (0, missing)) if missing else part).contiguous()

    def _lost(self, what: str, error: RuntimeError) -> PeerLost:
        return PeerLost(self._named, None, f"{what} the parts of a layer's output", first_line(error))
