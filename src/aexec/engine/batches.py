"""From what a step shall run to the message that says so: deltas for those whom the runners know."""

from __future__ import annotations

from typing import NamedTuple

from aexec.engine.allocation import KVAllocator
from aexec.engine.policy import StepPlan
from aexec.engine.records import ScheduledShare
from aexec.engine.request import Request
from aexec.messages.batch import CachedRequestData, NewRequestData, SchedulerOutput

__all__ = ("BuiltBatch", "build_batch")

_NO_BLOCKS: list[int] = []


class BuiltBatch(NamedTuple):
    """A step that is decided.

    Attributes:
        batch: What the runners are told.
        shares: What it runs of each request.
        leaders: Requests whose prompt other samples wait for, and that have computed it with this step.
    """

    batch: SchedulerOutput
    shares: list[ScheduledShare]
    leaders: list[Request]


def build_batch(
    plan: StepPlan, running: dict[str, Request], allocator: KVAllocator, forgotten: list[str]
) -> BuiltBatch:
    """Put a plan into words; from now on its tokens count as computed, and what it samples as on the way.

    Args:
        plan: What to run.
        running: All requests of the plan, by id.
        allocator: Caches what is computed.
        forgotten: Ids that the runners are to drop.
    """
    new: list[NewRequestData] = []
    known: list[str] = []
    new_token_ids: list[list[int]] = []
    new_block_ids: list[list[int]] = []
    starts: list[int] = []
    shares: list[ScheduledShare] = []
    leaders: list[Request] = []
    for request_id, num_tokens in plan.num_scheduled_tokens.items():
        request = running[request_id]
        num_known, start = len(request.token_ids) + request.num_placeholders, request.num_computed_tokens
        end = start + num_tokens
        if request.num_sent_tokens == 0:
            new.append(_introduce(request, allocator))
        else:
            known.append(request_id)
            new_token_ids.append(request.news())
            new_block_ids.append(plan.new_block_ids.get(request_id, _NO_BLOCKS))
            starts.append(start)
        is_sampled = end == num_known
        shares.append(ScheduledShare(request, request.epoch, start, is_sampled))
        request.num_placeholders += is_sampled
        request.num_sent_tokens = num_known
        request.num_computed_tokens = end
        if end >= request.caches_at:
            allocator.cache(request)
        if request.followers and end >= request.num_prompt_tokens:
            leaders.append(request)
    batch = SchedulerOutput(
        new=new,
        cached=CachedRequestData(
            request_ids=known, new_token_ids=new_token_ids, new_block_ids=new_block_ids, num_computed_tokens=starts
        ),
        num_scheduled_tokens=plan.num_scheduled_tokens,
        finished_request_ids=forgotten,
        kv_transfer=allocator.transfer(),
    )
    return BuiltBatch(batch, shares, leaders)


def _introduce(request: Request, allocator: KVAllocator) -> NewRequestData:
    return NewRequestData(
        request_id=request.request_id,
        token_ids=request.token_ids.copy(),
        num_prompt_tokens=request.num_prompt_tokens,
        block_ids=list(allocator.blocks.table(request.request_id)),
        num_computed_tokens=request.num_computed_tokens,
        sampling=request.sampling,
        stop_token_ids=sorted(request.stop_token_ids),
    )
