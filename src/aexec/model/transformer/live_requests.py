"""The requests that a model runner knows, kept up to date by the deltas of each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aexec.errors import ProtocolError
from aexec.messages.batch import PLACEHOLDER, CachedRequestData, NewRequestData, SchedulerOutput
from aexec.model.sampling.state import SamplingState
from aexec.model.transformer.inputs import ScheduledTokens

__all__ = ("LiveRequest", "LiveRequests")


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request.

    Attributes:
        sampling: How to sample it; holds its tokens.
        block_ids: int64, its KV blocks in order of position.
        num_computed_tokens: Tokens whose KV is stored.
    """

    sampling: SamplingState
    block_ids: NDArray[np.int64]
    num_computed_tokens: int

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output so far."""
        return self.sampling.token_ids


class LiveRequests:
    """All of them, by id.

    Args:
        tell: Turns the tokens that this rank has sampled last of some requests, None where it
            has not, into those that the sampling rank has; all ranks ask for the same requests.
    """

    def __init__(self, tell: Callable[[list[int | None]], list[int]] | None = None) -> None:
        self._tell = tell or _own_tokens
        self._requests: dict[str, LiveRequest] = {}
        self._forgotten = ""
        self._filled: set[int] | None = None  # blocks that hold KV since; None: there was no reason to ask

    def __repr__(self) -> str:
        blocks = sum(len(request.block_ids) for request in self._requests.values())
        return f"<LiveRequests: {len(self._requests)} with {blocks} blocks>"

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, request_id: str) -> LiveRequest:
        """The request of this id.

        Raises:
            ProtocolError: It is not known.
        """
        try:
            return self._requests[request_id]
        except KeyError:
            why = f"it was forgotten, as {self._forgotten}" if self._forgotten else "it was never sent as new"
            raise ProtocolError(f"request {request_id} is not known to the runner: {why}") from None

    def forget_all(self, why: str) -> None:
        """What the KV cache holds is void: requests have to come again, as new, with nothing computed."""
        self._requests.clear()
        self._forgotten, self._filled = why, set()

    def filled(self, block_ids: Sequence[int]) -> None:
        """These blocks hold KV that no request here has computed."""
        if self._filled is not None:
            self._filled.update(block_ids)

    def apply(self, batch: SchedulerOutput, block_size: int) -> list[int]:
        """Learn what the scheduler says.

        Returns:
            Blocks that requests got and that hold nothing of theirs yet.

        Raises:
            ProtocolError: A request is unknown, or is sent as new while it is live.
        """
        for request_id in batch.finished_request_ids:
            self._requests.pop(request_id, None)
        fresh: list[int] = []
        for new in batch.new:
            fresh += self._learn(new, block_size)
        fresh += self._extend(batch.cached)
        if self._filled is not None:
            self._filled.update(fresh)
        return fresh

    def shares(self, num_scheduled_tokens: dict[str, int]) -> list[ScheduledTokens]:
        """What each scheduled request runs, in the scheduler's order."""
        return [self._share(request_id, count) for request_id, count in num_scheduled_tokens.items()]

    def _share(self, request_id: str, count: int) -> ScheduledTokens:
        request = self[request_id]
        start = request.num_computed_tokens
        return ScheduledTokens(request_id, request.token_ids, request.block_ids, start, start + count)

    def _learn(self, new: NewRequestData, block_size: int) -> Sequence[int]:
        if new.request_id in self._requests:
            raise ProtocolError(f"request {new.request_id} is sent as new and is live already")
        num_filled = -(-new.num_computed_tokens // block_size)
        if self._filled is not None and not self._filled.issuperset(new.block_ids[:num_filled]):
            raise ProtocolError(
                f"request {new.request_id} comes with {new.num_computed_tokens} computed tokens in blocks that hold "
                f"nothing: {self._forgotten}"
            )
        blocks = np.array(new.block_ids, dtype=np.int64)
        self._requests[new.request_id] = LiveRequest(SamplingState.from_request(new), blocks, new.num_computed_tokens)
        return new.block_ids[num_filled:]

    def _extend(self, cached: CachedRequestData) -> list[int]:
        fresh: list[int] = []
        awaited: list[LiveRequest] = []
        columns = zip(
            cached.request_ids, cached.new_token_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        )
        for request_id, tokens, blocks, num_computed_tokens in columns:
            request = self[request_id]
            request.token_ids.extend(tokens)
            if tokens and tokens[-1] == PLACEHOLDER:
                awaited.append(request)
            request.num_computed_tokens = num_computed_tokens
            if blocks:
                request.block_ids = np.concatenate([request.block_ids, np.array(blocks, dtype=np.int64)])
                fresh += blocks
        if awaited:
            told = self._tell([request.sampling.sampled for request in awaited])
            for request, token in zip(awaited, told, strict=True):
                request.token_ids[-1] = token
        return fresh


def _own_tokens(sampled: list[int | None]) -> list[int]:
    """Those of a rank that samples by itself."""
    tokens = [token for token in sampled if token is not None]
    if len(tokens) < len(sampled):
        raise ProtocolError(
            f"{len(sampled) - len(tokens)} requests are to go on with the token sampled last, and none was sampled: "
            "expected SampleTokens of the step before"
        )
    return tokens
