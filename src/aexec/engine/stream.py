"""The hand-off of one request's tokens, from the driver to the one task that reads them.

The driver never waits for a reader. What a slow reader has not taken yet is merged, so
that he gets it in one chunk, and holds no more than the request's own output. All of it
happens on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from anyio import BusyResourceError

from aexec.messages.request import FinishReason, TokenChunk, TokenLogprobs

__all__ = ("TokenStream",)


class TokenStream:
    """New tokens of one request.

    Attributes:
        request_id: Whose.
        num_prompt_tokens: Tokens of its prompt.
        is_abandoned: Nobody reads it any longer.
    """

    def __init__(self, request_id: str, num_prompt_tokens: int) -> None:
        self.request_id, self.num_prompt_tokens = request_id, num_prompt_tokens
        self.is_abandoned = False
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._num_taken = 0
        self._error: BaseException | None = None
        self._pending = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_ended(self) -> bool:
        """Nothing more will be put."""
        return self._finish_reason is not None or self._error is not None

    # ------------------------------------------------------------ the driver's end

    def put(
        self,
        text: str,
        token_ids: Sequence[int] = (),
        logprobs: Sequence[TokenLogprobs] | None = None,
        prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None,
    ) -> None:
        """Hand over what is new."""
        self._texts.append(text)
        self._token_ids.extend(token_ids)
        if logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *logprobs]
        if prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs
        self._pending = True
        self._wake()

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Say that nothing follows what was put."""
        self._finish_reason, self._stop_reason, self._pending = reason, stop_reason, True
        self._wake()

    def fail(self, error: BaseException) -> None:
        """End in an error, once the reader has what was put."""
        self._error = error
        self._wake()

    # ------------------------------------------------------------ the reader's end

    async def get(self) -> TokenChunk:
        """All that is new; waits until something is.

        Raises:
            BusyResourceError: Another task is waiting here.
            Exception: What ended the request.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self._waiter is not None:
                raise BusyResourceError(f"reading from the stream of request {self.request_id}")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._take()

    def _take(self) -> TokenChunk:
        self._num_taken += len(self._token_ids)
        chunk = TokenChunk(
            request_id=self.request_id,
            text=self._texts[0] if len(self._texts) == 1 else "".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_completion_tokens=self._num_taken,
        )
        self._texts, self._token_ids, self._logprobs, self._prompt_logprobs = [], [], None, None
        self._pending = False
        return chunk

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def __repr__(self) -> str:
        """As in ``<TokenStream a: 12 tokens taken, 3 wait>``."""
        state = f", failed: {self._error}" if self._error is not None else ""
        state = f", finished: {self._finish_reason}" if self._finish_reason is not None else state
        return f"<TokenStream {self.request_id}: {self._num_taken} tokens taken, {len(self._token_ids)} wait{state}>"
