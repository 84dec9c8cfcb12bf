"""The grammar bitmask, as the runners receive it: checked once, its rows found by request.

Pure numpy; ``aexec.model.sampling.logits`` applies it on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aexec.errors import ProtocolError
from aexec.messages.batch import GrammarOutput

__all__ = ("allowed_tokens", "checked_bitmask", "grammar_rows")


def checked_bitmask(grammar: GrammarOutput, vocab_size: int) -> NDArray[np.int32]:
    """The bitmask, int32 ``[len(request_ids), ceil(vocab_size / 32)]``.

    Raises:
        ProtocolError: It has another type or another shape.
    """
    bitmask: NDArray[np.int32] = np.asarray(grammar.bitmask)
    expected = (len(grammar.request_ids), -(-vocab_size // 32))
    if bitmask.shape != expected or bitmask.dtype != np.int32:
        raise ProtocolError(
            f"the grammar bitmask is {bitmask.dtype} {list(bitmask.shape)}: expected int32 {list(expected)} for "
            f"{expected[0]} requests and a vocabulary of {vocab_size}"
        )
    return bitmask


def grammar_rows(request_ids: Sequence[str], grammar: GrammarOutput | None) -> dict[int, int]:
    """Row of the batch to row of the bitmask; requests that are not sampled now are passed over."""
    if grammar is None:
        return {}
    places = {request_id: place for place, request_id in enumerate(grammar.request_ids)}
    return {row: places[request_id] for row, request_id in enumerate(request_ids) if request_id in places}


def allowed_tokens(row: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """One row of a bitmask as bool ``[vocab_size]``."""
    octets = row.astype("<i4").view(np.uint8)
    return np.unpackbits(octets, bitorder="little", count=vocab_size).astype(np.bool_)
