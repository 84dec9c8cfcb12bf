"""One request as the scheduler sees it: tokens, how far they are computed, and its status.

Pure state: no clock, no randomness, no await. What may follow what is the table
:data:`TRANSITIONS`; whatever can be derived is a property.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from aexec.errors import ProtocolError
from aexec.messages.request import FinishReason, SamplingParams, TokenLogprobs

__all__ = ("FINISH_REASONS", "TRANSITIONS", "Request", "RequestStatus")


class RequestStatus(enum.Enum):
    """Where one request is."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "finished: stopped"
    FINISHED_LENGTH = "finished: length"
    FINISHED_ABORTED = "finished: aborted"
    FINISHED_FAILED = "finished: failed"

    __hash__ = object.__hash__  # members are single, and Enum's own hash is a call for each look-up


_FINISHED_EARLY = frozenset({RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_FAILED})
_FINISHED = _FINISHED_EARLY | {RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH}

TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING}) | _FINISHED_EARLY,
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED}) | _FINISHED,
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING}) | _FINISHED_EARLY,
    RequestStatus.FINISHED_STOPPED: frozenset(),
    RequestStatus.FINISHED_LENGTH: frozenset(),
    RequestStatus.FINISHED_ABORTED: frozenset(),
    RequestStatus.FINISHED_FAILED: frozenset(),
}

# A failed request has no finish reason: its stream ends in an error.
FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
}


@dataclass(slots=True, eq=False)
class Request:
    """One prompt's life.

    Attributes:
        request_id: Its id.
        token_ids: The prompt, then what was generated.
        num_prompt_tokens: How many of them are the prompt.
        sampling: How to sample; the scheduler fills in a seed when it takes the request.
        stop_token_ids: All ids that end it, the model's end tokens among them.
        max_num_tokens: Prompt and output together at most.
        status: Where it is.
        num_computed_tokens: Tokens whose KV is stored, or will be once the steps in
            flight are through.
        num_sent_tokens: Tokens that the model runners have been told; 0: they do not
            know the request.
        num_preemptions: How often its blocks were taken back.
        stop_reason: The token id or text that ended it.
        prompt_logprobs: Of the prompt's tokens from the second on, as far as computed.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    max_num_tokens: int
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_sent_tokens: int = 0
    num_preemptions: int = 0
    stop_reason: str | int | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_new_tokens(self) -> int:
        """Tokens that still have to run: 0 while its next token is being sampled."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_prefill(self) -> bool:
        """True while more than the last token has to run."""
        return len(self.token_ids) - self.num_computed_tokens > 1

    @property
    def is_finished(self) -> bool:
        """True once nothing can follow."""
        return self.status in _FINISHED

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it goes on, and when it failed."""
        return FINISH_REASONS.get(self.status)

    def move(self, status: RequestStatus) -> None:
        """Go to ``status``.

        Raises:
            ProtocolError: The table does not allow it.
        """
        if status not in TRANSITIONS[self.status]:
            raise ProtocolError(f"request {self.request_id} is {self.status.value}: it cannot become {status.value}")
        self.status = status

    def forget_computed(self) -> None:
        """Start over from the first token; what was generated is kept (preemption)."""
        self.num_computed_tokens = 0
        self.num_sent_tokens = 0
        if not self._has_prompt_logprobs():
            self.prompt_logprobs.clear()

    def append(self, token_id: int) -> RequestStatus | None:
        """Take one sampled token; returns the status that it ends the request with, if it does."""
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids and self.num_output_tokens > self.sampling.min_tokens:
            self.stop_reason = token_id
            return RequestStatus.FINISHED_STOPPED
        return RequestStatus.FINISHED_LENGTH if len(self.token_ids) >= self.max_num_tokens else None

    def add_prompt_logprobs(self, entries: list[TokenLogprobs]) -> None:
        """Take what one prefill chunk computed; a recompute of the whole prompt adds nothing."""
        room = self.num_prompt_tokens - 1 - len(self.prompt_logprobs)
        self.prompt_logprobs.extend(entries[: max(room, 0)])

    def _has_prompt_logprobs(self) -> bool:
        return len(self.prompt_logprobs) >= self.num_prompt_tokens - 1

    def __repr__(self) -> str:
        """As in ``<Request a: running, 12 + 3 tokens, 14 computed, 1 preemption(s)>``."""
        return (
            f"<Request {self.request_id}: {self.status.value}, {self.num_prompt_tokens} + {self.num_output_tokens} "
            f"tokens, {self.num_computed_tokens} computed, {self.num_preemptions} preemption(s)>"
        )
