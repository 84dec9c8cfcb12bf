"""The hand-off of one request's tokens, from the driver to the one task that reads them.

The driver never waits for a reader. What a slow reader has not taken yet is merged, so
that he gets it in one chunk, and holds no more than the request's own output. All of it
happens on one event loop. Where nothing is looked for in the text, tokens become text when
they are read, many at once if they were merged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from aexec.engine.text import TokenDecoder
from aexec.messages.request import FinishReason, TokenChunk, TokenLogprobs

__all__ = ("SampleStreams", "TokenStream")

_MOST_UNDECODED = 16  # tokens that wait to become text: the end of a long text is no longer than any other step


class TokenStream:
    """New tokens of one request, or of one of its samples.

    Attributes:
        request_id: Whose.
        num_prompt_tokens: Tokens of its prompt.
        index: Which of the samples.
        on_news: Called when there is something to take; set for streams that are read together.
        is_patient: Its reader wants all of it at once, and is woken at its end only.
        is_abandoned: Nobody reads it any longer.
        decoder: Turns what is read into text; None: what is put comes with its text.
    """

    def __init__(self, request_id: str, num_prompt_tokens: int, index: int = 0) -> None:
        self.request_id, self.num_prompt_tokens, self.index = request_id, num_prompt_tokens, index
        self.on_news: Callable[[], None] | None = None
        self.is_patient = self.is_abandoned = False
        self.decoder: TokenDecoder | None = None
        self._num_decoded = 0  # of the tokens that wait
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

    @property
    def is_taken(self) -> bool:
        """The reader has all of it."""
        return self._finish_reason is not None and not self._pending

    @property
    def has_news(self) -> bool:
        """The next :meth:`get` does not wait."""
        return self._pending or self._error is not None

    @property
    def is_one_of_many(self) -> bool:
        """The request has more samples than this one."""
        return self.on_news is not None

    @property
    def streams(self) -> tuple[TokenStream, ...]:
        """Itself, as the only one."""
        return (self,)

    # ------------------------------------------------------------ the driver's end

    def put(
        self,
        text: str,
        token_ids: Sequence[int] = (),
        logprobs: Sequence[TokenLogprobs] | None = None,
        prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None,
    ) -> None:
        """Hand over what is new."""
        if text:
            self._texts.append(text)
        self._token_ids.extend(token_ids)
        if len(self._token_ids) >= self._num_decoded + _MOST_UNDECODED:
            self._decode()
        if logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *logprobs]
        if prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs
        self._pending = True
        if not self.is_patient:
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
            Exception: What ended the request.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            self._waiter = waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            finally:
                self._waiter = None
        return self._take()

    def _decode(self) -> None:
        if self.decoder is not None:
            self._texts.extend(map(self.decoder.step, self._token_ids[self._num_decoded :]))
        self._num_decoded = len(self._token_ids)

    def _take(self) -> TokenChunk:
        self._decode()
        texts, token_ids = self._texts, tuple(self._token_ids)
        self._num_taken += len(token_ids)
        chunk = TokenChunk(
            request_id=self.request_id,
            index=self.index,
            text=texts[0] if len(texts) == 1 else "".join(texts),
            token_ids=token_ids,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_completion_tokens=self._num_taken,
        )
        texts.clear()
        self._token_ids.clear()
        self._logprobs = self._prompt_logprobs = None
        self._num_decoded, self._pending = 0, False
        return chunk

    def _wake(self) -> None:
        if self.on_news is not None:
            self.on_news()
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def __repr__(self) -> str:
        """As in ``<TokenStream a: 12 tokens taken, 3 wait>``."""
        state = f", failed: {self._error}" if self._error is not None else ""
        state = f", finished: {self._finish_reason}" if self._finish_reason is not None else state
        return f"<TokenStream {self.request_id}: {self._num_taken} tokens taken, {len(self._token_ids)} wait{state}>"


class SampleStreams:
    """The streams of one prompt's samples, read as one: whichever has something is next.

    Args:
        streams: One for each sample.
    """

    def __init__(self, streams: tuple[TokenStream, ...]) -> None:
        self.streams = streams
        self._news = asyncio.Event()
        self._turn = 0
        for stream in streams:
            stream.on_news = self._news.set

    @property
    def is_ended(self) -> bool:
        """Nothing more will be put into any of them."""
        return all(stream.is_ended for stream in self.streams)

    @property
    def is_taken(self) -> bool:
        """The reader has all of all of them."""
        return all(stream.is_taken for stream in self.streams)

    async def get(self) -> TokenChunk:
        """All that is new of one sample; waits until something is.

        Raises:
            Exception: What ended a sample.
        """
        while True:
            self._news.clear()
            for stream in self._in_turn():
                if stream.has_news:
                    self._turn = stream.index + 1
                    return await stream.get()
            await self._news.wait()

    def _in_turn(self) -> tuple[TokenStream, ...]:
        """All of them, the one after that which was read last first, so that none waits for ever."""
        turn = self._turn % len(self.streams)
        return self.streams[turn:] + self.streams[:turn]

    def __repr__(self) -> str:
        """As in ``<SampleStreams a: 3 of 4 samples go on>``."""
        live = sum(not stream.is_ended for stream in self.streams)
        return f"<SampleStreams {self.streams[0].request_id}: {live} of {len(self.streams)} samples go on>"
