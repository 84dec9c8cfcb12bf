"""One request as its caller holds it: an async iterator whose end is the request's end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol, Self

from anyio import BusyResourceError, to_thread

from aexec.engine.stream import SampleStreams, TokenStream
from aexec.engine.text import Tokenizer
from aexec.errors import InvalidRequest, QueueFull, WrongLoop
from aexec.messages.request import RequestOptions, SamplingParams, TokenChunk
from aexec.messages.structured import short

__all__ = ("Generation", "Submit", "check_request", "prompt_token_ids")

_NOT_TOKENS: tuple[type, ...] = (bytes, Mapping)  # which can be iterated over, and mean something else
_NO_OPTIONS = RequestOptions()
_LONG_TEXT = 4096  # characters above which a text is turned into tokens on a thread


class Submit(Protocol):
    """How a generation reaches the driver."""

    async def submit(
        self,
        prompt: tuple[object, ...],
        sampling: SamplingParams,
        options: RequestOptions,
        streams: tuple[TokenStream, ...],
    ) -> None:
        """Queue the request, of which each sample has a stream."""
        ...

    async def encode(self, prompt: object) -> tuple[object, ...]:
        """Token ids of a prompt."""
        ...

    def leave(self, stream: TokenStream) -> None:
        """Nobody reads the stream any longer; on the loop."""
        ...

    def leave_threadsafe(self, stream: TokenStream) -> None:
        """The same, from any thread and in the middle of anything."""
        ...


class Generation(AsyncIterator[TokenChunk]):
    """The chunks of one request, as they come; of several samples, each chunk says of which it is.

    The request begins with the first ``anext``, and ends when the iterator is left: at
    its end, by ``break``, by a cancellation, by ``aclose()``, or when nobody holds it.

    Attributes:
        request_id: Its id.
    """

    def __init__(
        self,
        driver: Submit,
        request_id: str,
        prompt: object,
        sampling: SamplingParams,
        options: RequestOptions = _NO_OPTIONS,
    ) -> None:
        self.request_id = request_id
        self._driver, self._prompt, self._sampling, self._options = driver, prompt, sampling, options
        self._stream: TokenStream | SampleStreams | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the engine's, once it has begun
        self._is_over = self._is_patient = self._is_read = False

    def merged(self) -> Self:
        """Itself, before it begins: what comes is kept back to the end, which spares a wake-up for each token."""
        self._is_patient = True
        return self

    async def __anext__(self) -> TokenChunk:
        """The next chunk; all that has come up to now, if several did.

        Raises:
            InvalidRequest: At the first chunk: the request cannot be run.
            QueueFull: At the first chunk: too many requests wait.
            EngineRecovering: It came while the workers were being rebuilt, and may not wait for them any longer.
            EngineDraining: At the first chunk: nothing new is taken.
            RequestFailed: The model could not go on with it.
            RequestTimeout: It took longer than its timeout.
            RequestAborted: The engine was closed.
            BusyResourceError: Another task is waiting here.
            WrongLoop: The engine was opened on another event loop.
            AexecError: What ended the executor.
        """
        if self._is_over:
            raise StopAsyncIteration
        if self._is_read:  # and whoever reads it goes on
            raise BusyResourceError(f"reading the stream of request {self.request_id} from")
        self._is_read = True
        try:
            stream = self._begun() or await self._begin()
            chunk = await stream.get()
        except WrongLoop:  # nobody would wake it here; on the engine's own loop it goes on
            raise
        except BaseException:
            self._leave()
            raise
        finally:
            self._is_read = False
        self._is_over = stream.is_taken
        return chunk

    async def aclose(self) -> None:
        """Leave; the request is aborted if it goes on, and its blocks are free."""
        self._leave()

    async def __aenter__(self) -> Self:
        """Itself, to be closed at the end of the block."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Leave."""
        self._leave()

    def _begun(self) -> TokenStream | SampleStreams | None:
        """Where its tokens come; None: it has not begun."""
        if self._loop is not None and self._loop is not (here := asyncio.get_running_loop()):
            raise WrongLoop("engine", repr(self._loop), repr(here))
        return self._stream

    async def _begin(self) -> TokenStream | SampleStreams:
        prompt = await self._driver.encode(self._prompt)
        if self._is_over:  # it was left meanwhile
            raise StopAsyncIteration
        streams = tuple(TokenStream(self.request_id, len(prompt), index) for index in range(self._sampling.n))
        for each in streams:
            each.is_patient = self._is_patient
        self._stream = stream = streams[0] if len(streams) == 1 else SampleStreams(streams)
        try:
            await self._driver.submit(prompt, self._sampling, self._options, streams)
        except WrongLoop:
            self._stream = None  # nothing was sent
            raise
        self._loop = asyncio.get_running_loop()
        return stream

    def _leave(self) -> None:
        if not self._is_over:
            self._is_over = True
            if self._stream is not None and not self._stream.is_ended:
                for stream in self._stream.streams:
                    if not stream.is_ended:
                        self._driver.leave(stream)

    def __del__(self) -> None:
        """Whoever drops it (``break`` does) leaves it."""
        if not self._is_over and self._stream is not None and not self._stream.is_ended:
            with contextlib.suppress(RuntimeError):  # its loop has ended, and the engine with it
                for stream in self._stream.streams:
                    self._driver.leave_threadsafe(stream)

    def __repr__(self) -> str:
        """As in ``<Generation a: running>``."""
        state = "over" if self._is_over else "not begun" if self._stream is None else "running"
        return f"<Generation {self.request_id}: {state}>"


def check_request(request_id: object, sampling: object, max_num_waiting: int) -> None:
    """See what a request is asked with, for users without a type checker, before anything is made for it.

    Raises:
        InvalidRequest: One of these is something else.
        QueueFull: Its samples are more than may ever wait.
    """
    if not isinstance(request_id, str):
        raise InvalidRequest(f"request_id is {short(request_id)}: expected text, or None")
    if not isinstance(sampling, SamplingParams | None):
        raise InvalidRequest(f"sampling is {short(sampling)}: expected SamplingParams(...)")
    if sampling is not None and sampling.n > max_num_waiting:
        raise QueueFull(request_id, max_num_waiting, num_samples=sampling.n)


async def prompt_token_ids(prompt: Any, tokenizer: Tokenizer | None) -> tuple[object, ...]:
    """Token ids of a prompt, not checked yet; a long text takes a thread.

    Raises:
        InvalidRequest: It is neither text nor a sequence, or is text and there is no tokenizer.
    """
    if not isinstance(prompt, str):
        if isinstance(prompt, _NOT_TOKENS) or not hasattr(prompt, "__iter__"):
            raise InvalidRequest(f"the prompt is {short(prompt)}: expected text or a sequence of token ids")
        return tuple(prompt)
    if not prompt:
        raise InvalidRequest("the prompt is an empty text: expected at least one character")
    if tokenizer is None:
        raise InvalidRequest(
            f"the prompt is the text {short(prompt)} and this model's directory has no tokenizer.json: pass token ids"
        )
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the prompt {short(prompt)} is no Unicode text ({error.reason})") from None
    if len(prompt) <= _LONG_TEXT:
        return tuple(tokenizer.encode(prompt))
    return tuple(await to_thread.run_sync(tokenizer.encode, prompt))
