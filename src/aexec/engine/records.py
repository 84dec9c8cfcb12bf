"""What the scheduler has to remember of a batch until its tokens are back. Pure.

By then a request may have ended, or given its blocks back, or another one may have its id; and
what has been scheduled since must not be taken for what this batch ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from aexec.engine.request import Request
from aexec.errors import ProtocolError
from aexec.messages.batch import ModelRunnerOutput, SchedulerOutput
from aexec.messages.request import TokenLogprobs

__all__ = ("BatchRecords", "RequestUpdate", "ScheduledShare", "check_output")


class RequestUpdate(msgspec.Struct, frozen=True, gc=False):
    """What one step brought one request; made by the hundred in a step, and so of no concern to the collector.

    Attributes:
        request: The request, already in its new status.
        token_ids: Its new tokens; none when it failed.
        logprobs: One entry per new token when they were asked for.
        error: Why it failed.
    """

    request: Request
    token_ids: list[int]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None


class ScheduledShare(msgspec.Struct, frozen=True, gc=False):
    """What a batch runs of one request.

    Attributes:
        request: Whose.
        epoch: The request's, then.
        start: Position of the first token that it runs.
        is_sampled: It runs up to the request's last token, and brings the next one.
    """

    request: Request
    epoch: int
    start: int
    is_sampled: bool

    @property
    def is_current(self) -> bool:
        """What comes of it is for the request still."""
        return self.request.epoch == self.epoch


class BatchRecords:
    """The batches whose tokens are not back."""

    def __init__(self) -> None:
        self._records: dict[int, tuple[SchedulerOutput, list[ScheduledShare]]] = {}  # by identity of the batch

    def __len__(self) -> int:
        """How many there are."""
        return len(self._records)

    def __repr__(self) -> str:
        """As in ``<BatchRecords: 2 batches, 16 requests>``."""
        shares = sum(len(shares) for _, shares in self._records.values())
        return f"<BatchRecords: {len(self._records)} batches, {shares} requests>"

    def keep(self, batch: SchedulerOutput, shares: list[ScheduledShare]) -> None:
        """Remember a batch; each request that it samples counts one more token on the way."""
        self._records[id(batch)] = batch, shares

    def sampled(self, batch: SchedulerOutput) -> Iterator[Request]:
        """The requests that a batch samples."""
        _, shares = self._records.get(id(batch), (batch, ()))
        return (share.request for share in shares if share.is_sampled)

    def take(self, batch: SchedulerOutput) -> list[ScheduledShare]:
        """The tokens of a batch are back, or will never be.

        Raises:
            ProtocolError: They have been, or the batch is another scheduler's.
        """
        if id(batch) not in self._records:
            raise ProtocolError("a batch came back that is not in flight: expected each one that was scheduled, once")
        _, shares = self._records.pop(id(batch))
        for share in shares:
            if share.is_sampled:
                share.request.num_placeholders -= 1
        return shares

    def discard(self, batch: SchedulerOutput) -> list[ScheduledShare]:
        """Nothing comes back of a batch, if it is in flight; returns what it was to run."""
        return self.take(batch) if id(batch) in self._records else []

    def behind(self) -> list[Request]:
        """The requests of all batches for which what is in flight is current, each once."""
        shares = [share for _, shares in self._records.values() for share in shares if share.is_current]
        return list({id(share.request): share.request for share in shares}.values())

    def requests(self, running: Iterable[Request] = ()) -> list[Request]:
        """The requests of all batches, be it that nothing is for them any longer, and ``running``, each once."""
        found = [share.request for _, shares in self._records.values() for share in shares]
        return list({id(request): request for request in (*found, *running)}.values())

    def clear(self) -> None:
        """Nothing comes back of any batch."""
        for batch, _ in list(self._records.values()):
            self.discard(batch)


def check_output(output: ModelRunnerOutput) -> None:
    """See whether the columns of an output belong together.

    Raises:
        ProtocolError: They do not.
    """
    lengths = {len(output.request_ids), len(output.sampled_token_ids)}
    if output.logprobs is not None:
        lengths.add(len(output.logprobs))
    if len(lengths) > 1:
        raise ProtocolError(f"the columns of ModelRunnerOutput have lengths {sorted(lengths)}: expected equal ones")
