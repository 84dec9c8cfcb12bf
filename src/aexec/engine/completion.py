"""A whole answer, for those who do not stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec

from aexec.errors import ProtocolError
from aexec.messages.request import FinishReason, TokenChunk, TokenLogprobs

__all__ = ("Completion", "collect")


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What one request came to.

    Attributes:
        request_id: Its id.
        text: All of its text.
        token_ids: All new tokens, the one that ended it among them.
        logprobs: One entry per new token when they were asked for.
        prompt_logprobs: One entry per prompt token when asked for; the first is None.
        finish_reason: Why it ended.
        stop_reason: The stop text or the token id that ended it.
        num_prompt_tokens: Tokens of the prompt.
        others: The further samples of the prompt; all else here is about the first.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int
    others: tuple[Completion, ...] = ()

    @property
    def samples(self) -> tuple[Completion, ...]:
        """All ``n`` samples of the prompt, itself as the first."""
        return (self, *self.others)

    @property
    def num_completion_tokens(self) -> int:
        """New tokens."""
        return len(self.token_ids)


async def collect(stream: AsyncIterator[TokenChunk]) -> Completion:
    """Read a stream to its end; raises what the stream raises."""
    samples: dict[int, list[TokenChunk]] = {}
    async for chunk in stream:
        samples.setdefault(chunk.index, []).append(chunk)
    if not samples:
        raise ProtocolError("the stream ended before its first chunk: expected a last chunk with a finish_reason")
    first, *others = (_joined(chunks) for _, chunks in sorted(samples.items()))
    return msgspec.structs.replace(first, others=tuple(others)) if others else first


def _joined(chunks: Sequence[TokenChunk]) -> Completion:
    """What the chunks of one sample come to."""
    last = chunks[-1]
    return Completion(
        request_id=last.request_id,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs or ()) or None,
        prompt_logprobs=next((chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs), None),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        num_prompt_tokens=last.num_prompt_tokens,
    )
