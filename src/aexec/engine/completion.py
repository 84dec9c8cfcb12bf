"""A whole answer, for those who do not stream."""

from __future__ import annotations

from collections.abc import AsyncIterator

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
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int

    @property
    def num_completion_tokens(self) -> int:
        """New tokens."""
        return len(self.token_ids)


async def collect(stream: AsyncIterator[TokenChunk]) -> Completion:
    """Read a stream to its end; raises what the stream raises."""
    texts: list[str] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    chunk: TokenChunk | None = None
    async for chunk in stream:
        texts.append(chunk.text)
        token_ids.extend(chunk.token_ids)
        logprobs.extend(chunk.logprobs or ())
        prompt_logprobs = prompt_logprobs or chunk.prompt_logprobs
    if chunk is None:
        raise ProtocolError("the stream ended before its first chunk: expected a last chunk with a finish_reason")
    return Completion(
        request_id=chunk.request_id,
        text="".join(texts),
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs) or None,
        prompt_logprobs=prompt_logprobs,
        finish_reason=chunk.finish_reason,
        stop_reason=chunk.stop_reason,
        num_prompt_tokens=chunk.num_prompt_tokens,
    )
