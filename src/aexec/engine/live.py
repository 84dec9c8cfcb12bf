"""The requests that somebody waits for: from what a step brought them to the streams of their readers.

Knows nothing of the executor. A step's tokens are first *read*, which may end a request at a
stop text and so changes what the scheduler runs next, and then, once the next step is under
way, *handed out*.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from aexec.engine.records import RequestUpdate
from aexec.engine.request import Request, RequestStatus
from aexec.engine.scheduler import Scheduler
from aexec.engine.stream import TokenStream
from aexec.engine.text import RequestText, TextDelta, Tokenizer
from aexec.errors import RequestFailed
from aexec.messages.request import TokenLogprobs

__all__ = ("Delta", "LiveRequest", "LiveStreams")


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that somebody waits for.

    Attributes:
        stream: Where its tokens go.
        text: Turns them into text, where a stop text is looked for; the stream does it otherwise.
        wants_prompt_logprobs: They were asked for, and not handed out yet.
        on_end: Called when it ends, in whatever way.
    """

    stream: TokenStream
    text: RequestText
    wants_prompt_logprobs: bool
    on_end: Callable[[], None] | None = None

    def take_prompt_logprobs(self, request: Request) -> tuple[TokenLogprobs | None, ...]:
        """Of the whole prompt, once: with the request's first token."""
        self.wants_prompt_logprobs = False
        return (None, *request.prompt_logprobs)


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What one request's reader gets from one step."""

    live: LiveRequest
    update: RequestUpdate
    text: TextDelta


class LiveStreams:
    """All of them, by id.

    Args:
        scheduler: Told when a request ends for a reason of its reader's or of its text.
        tokenizer: Turns tokens into text; None: there is no text.

    Attributes:
        on_empty: Called when the last one has ended.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer | None) -> None:
        self._scheduler, self._tokenizer = scheduler, tokenizer
        self._live: dict[str, LiveRequest] = {}
        self.on_empty: Callable[[], None] | None = None
        self.on_abandoned: Callable[[str, TokenStream], object] = self.abort

    def __len__(self) -> int:
        """How many there are."""
        return len(self._live)

    def __repr__(self) -> str:
        """As in ``<LiveStreams: 3 open>``."""
        return f"<LiveStreams: {len(self._live)} open>"

    @property
    def request_ids(self) -> list[str]:
        """Their ids, in order of arrival."""
        return list(self._live)

    def follow(self, request: Request, stream: TokenStream, on_end: Callable[[], None] | None = None) -> None:
        """Hand the tokens of ``request`` to ``stream`` from now on, and call ``on_end`` at its end."""
        stream.num_prompt_tokens = request.num_prompt_tokens
        sampling, decoder = request.sampling, None
        if self._tokenizer is not None:
            decoder = self._tokenizer.decoder(request.token_ids, skip_special_tokens=sampling.skip_special_tokens)
        if not sampling.stop:
            stream.decoder, decoder = decoder, None
        text = RequestText(decoder, sampling.stop, sampling.min_tokens)
        self._live[request.request_id] = LiveRequest(stream, text, sampling.prompt_logprobs is not None, on_end)

    def follows(self, request_id: str, stream: TokenStream) -> bool:
        """The tokens of a request, which goes on, are for this stream."""
        live = self._live.get(request_id)
        return live is not None and live.stream is stream

    def at_end(self, request_id: str, call: Callable[[], None]) -> None:
        """Call this too when a request ends, in whatever way; at once if it has."""
        live = self._live.get(request_id)
        if live is None:
            call()
            return
        live.on_end = call if live.on_end is None else _both(live.on_end, call)

    # ------------------------------------------------------------ what a step brought

    def read(self, updates: Iterable[RequestUpdate]) -> list[Delta]:
        """Turn new tokens into text, and end requests at a stop text or when their reader has left."""
        deltas: list[Delta] = []
        abandoned: list[Delta] = []
        for update in updates:
            request = update.request
            live = self._live[request.request_id]
            text = live.text.feed(update.token_ids)
            delta = Delta(live, update, text)
            deltas.append(delta)
            if text.stop is not None and not request.is_finished:
                self._scheduler.finish(request.request_id, RequestStatus.FINISHED_STOPPED)
            if live.stream.is_abandoned:  # and the mailbox had no room for its Abort
                abandoned.append(delta)
        for delta in abandoned:
            self.on_abandoned(delta.update.request.request_id, delta.live.stream)
        return deltas

    def hand_out(self, delta: Delta) -> None:
        """Give a reader what is new; the last of a request ends its stream."""
        live, update, text = delta.live, delta.update, delta.text.text
        request, token_ids, logprobs = update.request, update.token_ids, update.logprobs
        prompt_logprobs = live.take_prompt_logprobs(request) if live.wants_prompt_logprobs else None
        if request.status is RequestStatus.RUNNING or not request.is_finished:
            live.stream.put(text, token_ids, logprobs, prompt_logprobs)
            return
        self._forget(request.request_id)
        if update.error is not None:
            live.stream.fail(RequestFailed(f"request {request.request_id} failed: {update.error}"))
            return
        live.stream.put(text + live.text.flush(), token_ids, logprobs, prompt_logprobs)
        if delta.text.stop is not None:
            live.stream.finish("stop", delta.text.stop)
        elif request.finish_reason is not None:
            live.stream.finish(request.finish_reason, request.stop_reason)

    # ------------------------------------------------------------ ends that no step brings

    def abort(self, request_id: str, stream: TokenStream | None = None) -> bool:
        """End a request now, or all samples of one; its stream says ``abort``.

        Args:
            request_id: Which.
            stream: Only if this is its stream; None: whichever it has.

        Returns:
            False: there is no such request any longer.
        """
        samples = self._samples(request_id) if stream is None else [request_id]
        live = self._live.get(request_id)
        if not samples or (stream is not None and (live is None or live.stream is not stream)):
            return False
        for name in samples:
            live = self._live[name]
            self._end(name, RequestStatus.FINISHED_ABORTED)
            live.stream.put(live.text.flush())
            live.stream.finish("abort")
        return True

    def _samples(self, request_id: str) -> list[str]:
        """The ids of all samples of a request that go on."""
        live = self._live.get(request_id)
        if live is not None and not live.stream.is_one_of_many:
            return [request_id]
        return [name for name, each in self._live.items() if request_id in {name, each.stream.request_id}]

    def fail(
        self,
        request_ids: Iterable[str],
        error: Exception,
        status: RequestStatus = RequestStatus.FINISHED_FAILED,
    ) -> None:
        """End these requests, those of them that go on, each with an error object of its own."""
        for request_id in request_ids:
            live = self._live.get(request_id)
            if live is not None:
                self._end(request_id, status)
                live.stream.fail(_again(error))

    def _end(self, request_id: str, status: RequestStatus) -> None:
        self._scheduler.finish(request_id, status)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        live = self._live.pop(request_id, None)
        if live is not None and live.on_end is not None:
            live.on_end()
        if not self._live and self.on_empty is not None:
            self.on_empty()


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        second()

    return call


def _again(error: Exception) -> Exception:
    """The same error for one more reader: raising one object in many tasks mixes their tracebacks."""
    try:
        raised = copy.copy(error)
    except Exception:  # noqa: BLE001  # it cannot be copied, as its arguments do not fit its constructor
        return error
    raised.__cause__, raised.__notes__ = error.__cause__, list(getattr(error, "__notes__", ()))
    return raised
