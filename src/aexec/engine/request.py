"""One request as the scheduler sees it: tokens, how far they are computed, and its status.

Pure state: no clock, no randomness, no await. What may follow what is the table
:data:`TRANSITIONS`; whatever can be derived is a property.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from aexec.engine.grammar.following import RequestGrammar
from aexec.engine.prefix import BlockHash
from aexec.errors import ProtocolError
from aexec.messages.batch import PLACEHOLDER
from aexec.messages.request import FinishReason, SamplingParams, TokenLogprobs
from aexec.messages.structured import StructuredOutput

__all__ = ("FINISH_REASONS", "NEVER", "TRANSITIONS", "Request", "RequestStatus")

NEVER = sys.maxsize
"""A number of tokens that no request reaches."""


class RequestStatus(enum.Enum):
    """Where one request is."""

    WAITING = "waiting"
    WAITING_FOR_GRAMMAR = "waiting for its grammar"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "finished: stopped"
    FINISHED_LENGTH = "finished: length"
    FINISHED_ABORTED = "finished: aborted"
    FINISHED_FAILED = "finished: failed"

    __hash__ = object.__hash__  # members are single, and Enum's own hash is a call for each look-up


_PLACEHOLDERS = [PLACEHOLDER]  # of nearly all requests, in nearly all steps that overlap
_FINISHED_EARLY = frozenset({RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_FAILED})
_FINISHED = _FINISHED_EARLY | {RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH}

TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING}) | _FINISHED_EARLY,
    RequestStatus.WAITING_FOR_GRAMMAR: frozenset({RequestStatus.WAITING}) | _FINISHED_EARLY,
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED}) | _FINISHED,
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING}) | _FINISHED,  # by a token that was on its way
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
        priority: The lower, the earlier it is admitted, and the later it gives its blocks back.
        cache_salt: Requests of one salt share what they begin with.
        arrival: The scheduler's count when it came.
        index: Which of the samples of one prompt it is.
        leader: The sample that computes the prompt of this one; None once it has, or for a
            request of its own.
        followers: Samples that wait for this one to compute their prompt.
        structured: The form that its output is held to.
        grammar: The compiled form of it, which follows its tokens; None before it is there.
        status: Where it is.
        num_computed_tokens: Tokens whose KV is stored, or will be once the steps in
            flight are through.
        num_sent_tokens: Tokens that the model runners have been told; 0: they do not
            know the request.
        num_placeholders: Tokens of it that steps in flight sample.
        epoch: Counts the times that what steps in flight bring it has become void.
        num_preemptions: How often its blocks were taken back.
        stop_reason: The token id or text that ended it.
        prompt_logprobs: Of the prompt's tokens from the second on, as far as computed.
        num_cached_tokens: Tokens that it did not have to compute when it was admitted last.
        root_hash: Where the chain of its block hashes begins; empty: it shares nothing.
        block_hashes: Of its full blocks, as far as they were asked for.
        num_cached_blocks: Its blocks, from the first on, that others can find.
        caches_at: Computed tokens from which on there is one more.
        num_slots: Token positions that its blocks hold.
        last_news: What it was given last, by one step; not to be changed.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    max_num_tokens: int
    priority: int = 0
    cache_salt: str = ""
    arrival: int = 0
    index: int = 0
    leader: Request | None = None
    followers: list[Request] = field(default_factory=list["Request"])
    structured: StructuredOutput | None = None
    grammar: RequestGrammar | None = None
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_sent_tokens: int = 0
    num_placeholders: int = 0
    epoch: int = 0
    num_preemptions: int = 0
    stop_reason: str | int | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    num_cached_tokens: int = 0
    root_hash: BlockHash = b""
    block_hashes: list[BlockHash] = field(default_factory=list[BlockHash])
    num_cached_blocks: int = 0
    caches_at: int = NEVER
    num_slots: int = 0
    last_news: list[int] = field(default_factory=list[int])

    @property
    def rank(self) -> tuple[int, int]:
        """Its place among others: the lower, the more important."""
        return self.priority, self.arrival

    @property
    def is_ready(self) -> bool:
        """True unless something has to come before it may run."""
        return self.leader is None and self.status is not RequestStatus.WAITING_FOR_GRAMMAR

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

    def take(self, sampled: list[int]) -> RequestStatus | None:
        """Take what one step sampled, up to the token that ends it; returns the status that it ends with, if it does."""
        tokens, self.last_news = self.token_ids, sampled
        num_before = len(tokens)
        for token_id in sampled:
            tokens.append(token_id)
            if token_id in self.stop_token_ids and self.num_output_tokens > self.sampling.min_tokens:
                status, self.stop_reason = RequestStatus.FINISHED_STOPPED, token_id
            elif len(tokens) >= self.max_num_tokens:
                status = RequestStatus.FINISHED_LENGTH
            else:
                continue
            self.last_news = tokens[num_before:]
            return status
        return None

    def news(self) -> list[int]:
        """Tokens that the runners have not been told; placeholders for those that are being sampled.

        Not to be changed: a list for each request and step is what the garbage collector would count.
        """
        num_told, num_known = self.num_sent_tokens, len(self.token_ids)
        if not self.num_placeholders and num_told + len(self.last_news) == num_known:
            return self.last_news
        if num_told == num_known and self.num_placeholders == 1:  # nearly always, when steps overlap
            return _PLACEHOLDERS
        placeholders = [PLACEHOLDER] * (num_known + self.num_placeholders - max(num_told, num_known))
        return self.token_ids[num_told:] + placeholders

    def add_prompt_logprobs(self, start: int, entries: Sequence[TokenLogprobs]) -> None:
        """Take what one prefill chunk computed; a recompute adds nothing that is there.

        Args:
            start: Position of the chunk's first token, which tells about the one after it.
            entries: One for each position.
        """
        num_there = len(self.prompt_logprobs)
        if start <= num_there:
            self.prompt_logprobs.extend(entries[num_there - start :])

    def __repr__(self) -> str:
        """As in ``<Request a: running, 12 + 3 tokens, 14 computed, 1 preemption(s)>``."""
        return (
            f"<Request {self.request_id}: {self.status.value}, {self.num_prompt_tokens} + {self.num_output_tokens} "
            f"tokens, {self.num_computed_tokens} computed, {self.num_preemptions} preemption(s)>"
        )
