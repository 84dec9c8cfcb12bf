"""From what a step shall run to the message that says so: deltas for those whom the runners know."""

from __future__ import annotations

from typing import NamedTuple

from aexec.engine.allocation import KVAllocator
from aexec.engine.policy import StepPlan
from aexec.engine.records import ScheduledShare
from aexec.engine.request import Request
from aexec.messages.batch import CachedRequestData, NewRequestData, SchedulerOutput

__all__ = ("BuiltBatch", "build_batch")


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
    """Put a plan into words; from now on its tokens count as computed.

    Args:
        plan: What to run.
        running: All requests of the plan, by id.
        allocator: Caches what is computed.
        forgotten: Ids that the runners are to drop.
    """
    new: list[NewRequestData] = []
    cached = CachedRequestData(request_ids=[], new_token_ids=[], new_block_ids=[], num_computed_tokens=[])
    shares: list[ScheduledShare] = []
    leaders: list[Request] = []
    for request_id, num_tokens in plan.num_scheduled_tokens.items():
        request = running[request_id]
        num_known, start = len(request.token_ids) + request.num_placeholders, request.num_computed_tokens
        shares.append(ScheduledShare(request, request.epoch, start, start + num_tokens == num_known))
        if request.num_sent_tokens == 0:
            new.append(_introduce(request, allocator))
        else:
            cached.request_ids.append(request_id)
            news = request.news() if request.num_placeholders else request.token_ids[request.num_sent_tokens :]
            cached.new_token_ids.append(news)
            cached.new_block_ids.append(plan.new_block_ids[request_id])
            cached.num_computed_tokens.append(start)
        request.num_sent_tokens = num_known
        request.num_computed_tokens = end = start + num_tokens
        if end >= request.caches_at:
            allocator.cache(request)
        if request.followers and end >= request.num_prompt_tokens:
            leaders.append(request)
    batch = SchedulerOutput(
        new=new,
        cached=cached,
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
