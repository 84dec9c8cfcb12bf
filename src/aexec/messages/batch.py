"""One step's batch, as deltas: what the scheduler tells the model runners, and their answer.

Names and meanings are vLLM's, so that a reader of either finds his way in the other.
Source: vLLM 0.25.1, ``v1/core/sched/output.py`` and ``v1/outputs.py`` (names only).
"""

from __future__ import annotations

from typing import Any

import msgspec

from aexec.messages.request import SamplingParams, TokenLogprobs

__all__ = (
    "PLACEHOLDER",
    "CachedRequestData",
    "GrammarOutput",
    "KVConnectorOutput",
    "KVTransfer",
    "ModelRunnerOutput",
    "NewRequestData",
    "SchedulerOutput",
)


PLACEHOLDER = -1
"""In ``CachedRequestData.new_token_ids``: the token that the runners sampled last of this request."""


class NewRequestData(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the runners have not seen, or have dropped when it was preempted.

    Attributes:
        request_id: Its id.
        token_ids: Prompt, then what was generated before a preemption.
        num_prompt_tokens: How many of them are the prompt.
        block_ids: Its KV blocks, in order of position.
        num_computed_tokens: Tokens whose KV is in those blocks already.
        sampling: How to sample; ``seed`` is always set here unless it is greedy.
        stop_token_ids: All ids that end it, the model's end tokens among them; masked
            while fewer than ``sampling.min_tokens`` tokens are out.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: list[int]
    num_computed_tokens: int
    sampling: SamplingParams
    stop_token_ids: list[int] = []


class CachedRequestData(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that the runners know, as columns of equal length.

    Attributes:
        request_ids: Their ids.
        new_token_ids: Tokens that were sampled since the runners last heard of the
            request; every rank appends them, the one that sampled them too. The last one may
            be :data:`PLACEHOLDER`, where the step that samples it is in flight.
        new_block_ids: KV blocks to append.
        num_computed_tokens: Tokens whose KV is stored before this step.
    """

    request_ids: list[str] = []
    new_token_ids: list[list[int]] = []
    new_block_ids: list[list[int]] = []
    num_computed_tokens: list[int] = []


class KVTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """KV blocks to move out of the cache and into it before a step's forward pass; columns of equal length.

    All stores come first: a block that is stored may be one that the step loads into or computes anew.
    A key names what a block holds: the connector's scheduler side makes it, ranks only compare it.

    Attributes:
        epoch: Which attachment of the ranks it is for; they refuse one of another epoch.
        store_block_ids: Blocks whose content is to be kept elsewhere.
        store_keys: What each of them holds.
        load_block_ids: Blocks to fill.
        load_keys: What each of them shall hold.
    """

    epoch: int
    store_block_ids: list[int] = []
    store_keys: list[bytes] = []
    load_block_ids: list[int] = []
    load_keys: list[bytes] = []


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What to run in one step.

    Attributes:
        new: Requests that the runners have to learn.
        cached: Requests that they know.
        num_scheduled_tokens: Tokens to run, by request id. A request whose
            ``num_computed_tokens + num_scheduled_tokens`` reaches its last token is sampled.
        finished_request_ids: Forget these (finished, aborted or preempted) before all else.
        kv_transfer: Blocks to store and to load before the forward pass; None: none.
    """

    new: list[NewRequestData] = []
    cached: CachedRequestData = CachedRequestData()
    num_scheduled_tokens: dict[str, int] = {}
    finished_request_ids: list[str] = []
    kv_transfer: KVTransfer | None = None

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens of the whole step; 0: there is nothing to forward or to sample."""
        return sum(self.num_scheduled_tokens.values())


class GrammarOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The grammar bitmask of one step, for the requests that have a grammar.

    Attributes:
        request_ids: One for each row.
        bitmask: int32 ``[len(request_ids), ceil(vocab_size / 32)]`` numpy array; bit
            ``t % 32`` of word ``t // 32`` allows token ``t``.
    """

    request_ids: list[str]
    bitmask: Any


class KVConnectorOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a connector that moves KV blocks between engines reports with a step.

    A rank reports for itself; the executor makes one report of all (``executor.kv_output``).

    Attributes:
        finished_sending: Requests whose blocks are sent, so that they may be freed.
        finished_recving: Requests whose blocks have arrived.
        invalid_block_ids: Blocks that could not be loaded: compute them again.
        dropped: Keys of blocks that are not, or no longer, held; of any rank.
        events: Facts about blocks, in order.
        stats: Figures; those of all ranks are added up.
        expected_finished_count: Ranks that have to report a request before it counts as
            sent or received; 0: all.
    """

    finished_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    invalid_block_ids: frozenset[int] = frozenset()
    dropped: frozenset[bytes] = frozenset()
    events: tuple[Any, ...] = ()
    stats: dict[str, float] = {}
    expected_finished_count: int = 0


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What the output rank sampled in one step.

    Attributes:
        request_ids: Requests that were sampled, in batch order.
        sampled_token_ids: ``[num_requests][num_new_tokens]``; one each today.
        logprobs: One entry per request, None where not asked for; None when nobody asked.
        prompt_logprobs: By request id, for the prompt positions that this step computed.
        errors: By request id: why it cannot go on. Such a request has no token.
        refused: Those of ``errors`` that end for what they asked for: the KV that was computed for them is
            right. That of the others is taken to be wrong, and nobody shares it.
        kv_connector_output: What the KV connectors report; None without one.
    """

    request_ids: list[str] = []
    sampled_token_ids: list[list[int]] = []
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
    errors: dict[str, str] = {}
    refused: frozenset[str] = frozenset()
    kv_connector_output: KVConnectorOutput | None = None
