"""From "run so many tokens of these requests" to the arrays of one ragged forward pass.

Everything of a step lies in one row of tokens: first the requests that run a single token
(decodes, mostly), then those that run more (chunks of prompts). A token's *slot* is its place in KV memory, ``block * block_size +
offset``; block 0 is the null block, which belongs to nobody and pads block tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from aexec.errors import ProtocolError

__all__ = (
    "Chunk",
    "DecodeGroup",
    "ScheduledTokens",
    "StepInputs",
    "build_inputs",
    "group_decodes",
    "padded_tables",
    "prompt_rows",
    "slot_mapping",
)

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """One request's share of a step.

    Attributes:
        request_id: Its id.
        token_ids: All its tokens, prompt and output.
        block_ids: int64, its KV blocks in order of position.
        start: Position of the first token to run: all before it are in KV memory.
        stop: One past the last.
    """

    request_id: str
    token_ids: Sequence[int]
    block_ids: Ints
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Tokens to run."""
        return self.stop - self.start

    @property
    def is_sampled(self) -> bool:
        """The last known token is among them, so that its logits choose the next one."""
        return self.stop == len(self.token_ids)

    def block_table(self, block_size: int) -> Ints:
        """Its blocks up to the last token that it runs."""
        return self.block_ids[: -(-self.stop // block_size)]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes of about the same length, attended to at once; B of them.

    Attributes:
        start: Row of the first.
        kv_lens: int64 ``[B]``, positions that each attends to.
        block_ids: int64 ``[B, width]``, block tables padded with the null block.
    """

    start: int
    kv_lens: Ints
    block_ids: Ints


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several tokens of one request.

    Attributes:
        start: Row of its first token.
        num_tokens: How many they are.
        kv_len: Positions that its last token attends to.
        block_ids: int64 ``[ceil(kv_len / block_size)]``.
    """

    start: int
    num_tokens: int
    kv_len: int
    block_ids: Ints


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The arrays of one forward pass over T tokens.

    Attributes:
        token_ids: int64 ``[T]``.
        positions: int64 ``[T]``.
        slots: int64 ``[T]``, where each token's key and value go.
        order: The requests in the order of their rows.
        decode_groups: Those that run a single token.
        chunks: Those that run more.
    """

    token_ids: Ints
    positions: Ints
    slots: Ints
    order: tuple[ScheduledTokens, ...]
    decode_groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]

    @property
    def last_rows(self) -> list[int]:
        """The row of each request's last token, in the order of ``order``."""
        return [end - 1 for end in accumulate(share.num_tokens for share in self.order)]


def build_inputs(shares: Sequence[ScheduledTokens], block_size: int) -> StepInputs:
    """Lay a step out.

    Raises:
        ProtocolError: A request is to run no token, more than it has, or more than its
            blocks hold.
    """
    for share in shares:
        _check(share, block_size)
    groups = group_decodes([share for share in shares if share.num_tokens == 1])
    longer = [share for share in shares if share.num_tokens > 1]
    order = (*(share for group in groups for share in group), *longer)
    return StepInputs(
        token_ids=_joined([share.token_ids[share.start : share.stop] for share in order]),
        positions=_joined([np.arange(share.start, share.stop) for share in order]),
        slots=_joined([slot_mapping(share.block_ids, share.start, share.stop, block_size) for share in order]),
        order=order,
        decode_groups=tuple(_decode_groups(groups, block_size)),
        chunks=tuple(_chunks(longer, sum(map(len, groups)), block_size)),
    )


def group_decodes(decodes: Sequence[ScheduledTokens]) -> list[list[ScheduledTokens]]:
    """Groups within which the longest is hardly more than twice as long as the shortest.

    A group is padded to its longest, so one long request must not make a hundred short ones
    as dear as itself. Requests of similar length, which is the usual case, stay one group in
    the order in which they came.
    """
    if not decodes:
        return []
    if max(share.stop for share in decodes) <= _group_limit(min(share.stop for share in decodes)):
        return [list(decodes)]
    groups: list[list[ScheduledTokens]] = []
    for share in sorted(decodes, key=lambda share: share.stop):
        if groups and share.stop <= _group_limit(groups[-1][0].stop):
            groups[-1].append(share)
        else:
            groups.append([share])
    return groups


def _group_limit(shortest: int) -> int:
    return 2 * shortest + 128


def slot_mapping(block_ids: Ints, start: int, stop: int, block_size: int) -> Ints:
    """The slots of the positions from ``start`` up to ``stop``."""
    if stop - start == 1:
        return block_ids[start // block_size : start // block_size + 1] * block_size + start % block_size
    positions = np.arange(start, stop)
    return block_ids[positions // block_size] * block_size + positions % block_size


def prompt_rows(share: ScheduledTokens, num_prompt_tokens: int, first_row: int) -> tuple[list[int], list[int]]:
    """Rows whose logits tell how likely a token of the prompt was, and those tokens.

    A position foretells the next one, so the prompt's first token has no row.

    Args:
        share: What the request runs in this step.
        num_prompt_tokens: How many of its tokens are the prompt.
        first_row: Row of the share's first token.
    """
    stop = min(share.stop, num_prompt_tokens - 1)
    count = max(0, stop - share.start)
    rows = list(range(first_row, first_row + count))
    return rows, list(share.token_ids[share.start + 1 : share.start + 1 + count])


def _check(share: ScheduledTokens, block_size: int) -> None:
    known, room = len(share.token_ids), len(share.block_ids) * block_size
    if not 0 <= share.start < share.stop <= known:
        raise ProtocolError(
            f"request {share.request_id} is to run positions {share.start} to {share.stop} "
            f"and has {known} tokens: expected at least one, all of them known"
        )
    if share.stop > room:
        raise ProtocolError(
            f"request {share.request_id} is to run up to position {share.stop} and its "
            f"{len(share.block_ids)} blocks hold {room}"
        )


def _decode_groups(groups: Sequence[Sequence[ScheduledTokens]], block_size: int) -> list[DecodeGroup]:
    starts = accumulate(map(len, groups), initial=0)
    return [
        DecodeGroup(
            start,
            np.array([share.stop for share in group], dtype=np.int64),
            padded_tables([share.block_table(block_size) for share in group]),
        )
        for start, group in zip(starts, groups, strict=False)
    ]


def _chunks(longer: Sequence[ScheduledTokens], first_row: int, block_size: int) -> list[Chunk]:
    starts = accumulate((share.num_tokens for share in longer), initial=first_row)
    return [
        Chunk(start, share.num_tokens, share.stop, share.block_table(block_size))
        for start, share in zip(starts, longer, strict=False)
    ]


def _joined(parts: Sequence[Sequence[int] | Ints]) -> Ints:
    return np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, dtype=np.int64)


def padded_tables(tables: Sequence[Ints]) -> Ints:
    """Block tables as int64 ``[len(tables), width]``, padded with the null block."""
    padded = np.zeros((len(tables), max(map(len, tables), default=0)), dtype=np.int64)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return padded
