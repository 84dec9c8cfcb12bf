"""Hidden states as tensors, worker to worker, by ``torch.distributed``.

Both ends know a step's shape from the step itself, so nothing is said beforehand. A send is
queued and its tensor kept; the next sends look after the oldest, so that a stage works on
step n + 1 while the stage after it works on step n. Each transfer carries its step as its
tag: stages that are not at the same step wait for each other, and time out, but never take
one step's hidden states for another's. (nccl knows no tags; there the order has to do.)
"""

from __future__ import annotations

import datetime as dt
import time
from collections import deque
from typing import Any, NamedTuple

from torch import Tensor

from aexec.errors import PeerLost
from aexec.parallel.groups import Groups, distributed, first_line
from aexec.parallel.link import LinkStatistics

__all__ = ("TensorLink",)

_MOST_TAG = 2**31 - 1


class _Send(NamedTuple):
    step: int
    work: Any
    tensor: Tensor  # has to live until the work is done


class TensorLink:
    """A ``StageLink`` between ranks at the same place of neighbouring stages.

    Args:
        groups: With a pipeline of more than one stage.
    """

    def __init__(self, groups: Groups) -> None:
        layout, self._group = groups.layout, groups.pipeline
        self._from, self._to = layout.neighbour(groups.rank, -1), layout.neighbour(groups.rank, 1)  # torch's numbers
        self._rank, replica = groups.rank % layout.replica_size, layout.one_replica  # the executor's, for people
        self._before, self._after = replica.neighbour(self._rank, -1), replica.neighbour(self._rank, 1)
        self._limit = dt.timedelta(seconds=groups.timeout)
        self._most_in_flight = layout.pipeline + 1
        self._sends: deque[_Send] = deque()
        self._received = self._sent = 0
        self._waited = 0.0

    def __repr__(self) -> str:
        figures = self.statistics()
        return f"<TensorLink of rank {self._rank}: {self._before} to {self._after}, {figures.in_flight} in flight>"

    def statistics(self) -> LinkStatistics:
        """The figures so far."""
        return LinkStatistics(self._received, self._sent, len(self._sends), self._waited)

    def open(self) -> None:
        """Nothing is left to do: the groups are open."""

    def receive(self, step: int, into: Tensor, /) -> Tensor:
        """Wait for the hidden states of a step.

        Args:
            step: Its id.
            into: ``[1, num_tokens, hidden_size]``, overwritten.

        Raises:
            PeerLost: The stage before is gone or too late, or failed at this step.
        """
        doing, begun = f"receive the hidden states of step {step}", time.monotonic()
        try:
            distributed.irecv(into, self._from, group=self._group, tag=_tag(step)).wait(self._limit)
        except RuntimeError as error:
            raise PeerLost(self._rank, self._before, doing, first_line(error)) from error
        finally:
            self._waited += time.monotonic() - begun
        self._received += 1
        if _is_failure(into):
            raise PeerLost(self._rank, self._before, doing, "it failed at this step")
        return into

    def send(self, step: int, hidden: Tensor, /) -> None:
        """Hand hidden states ``[1, num_tokens, hidden_size]`` on; see ``StageLink``.

        Raises:
            PeerLost: The stage after is gone, or does not take what was sent long ago.
        """
        while len(self._sends) >= self._most_in_flight:
            self._finish(self._sends.popleft())
        tensor = hidden.contiguous()
        try:
            work = distributed.isend(tensor, self._to, group=self._group, tag=_tag(step))
        except RuntimeError as error:
            raise self._lost(step, error) from error
        self._sends.append(_Send(step, work, tensor))
        self._sent += 1

    def send_failure(self, step: int, blank: Tensor, /) -> None:
        """Send what no model computes: nothing but NaN."""
        self.send(step, blank.fill_(float("nan")))

    def close(self) -> None:
        """Forget what is in flight; the groups are closed by whoever opened them."""
        self._sends.clear()

    def _finish(self, send: _Send) -> None:
        try:
            send.work.wait(self._limit)
        except RuntimeError as error:
            raise self._lost(send.step, error) from error

    def _lost(self, step: int, error: RuntimeError) -> PeerLost:
        return PeerLost(self._rank, self._after, f"send the hidden states of step {step}", first_line(error))


def _tag(step: int) -> int:
    return step & _MOST_TAG


def _is_failure(hidden: Tensor) -> bool:
    """On CUDA looking costs more than it is worth: there the NaN fail each request by itself."""
    return hidden.device.type == "cpu" and bool(hidden[0, 0, 0].isnan()) and bool(hidden.isnan().all())
