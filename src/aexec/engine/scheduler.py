"""Which tokens of which requests run in the next step.

Two pure halves around a model step: :meth:`Scheduler.schedule` decides a batch, and
:meth:`Scheduler.update` takes what the batch sampled. There is no prefill phase and no
decode phase: each request has tokens, and tokens whose KV is stored; a step closes part
of that gap for as many requests as the token budget, the sequence budget and the free
blocks allow. Long prompts are cut into chunks that ride along with the decodes; when
blocks run out, the latest request gives its own back and starts over later, keeping what
it generated.

The scheduler counts tokens as computed when it schedules them, not when they return, so
it may be asked for the next batch while one is in flight: a request whose next token is
still being sampled has nothing to run, and is passed over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from aexec.config import SchedulerConfig
from aexec.engine.blocks import BlockPool, BlockStatistics
from aexec.engine.policy import FcfsQueue, StepPlan, decodes_first, latest
from aexec.engine.request import Request, RequestStatus
from aexec.errors import InvalidRequest
from aexec.messages.batch import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from aexec.messages.request import TokenLogprobs

__all__ = ("RequestUpdate", "Scheduler", "SchedulerStatistics")

_NO_TOKENS: list[int] = []


class RequestUpdate(NamedTuple):
    """What one step brought one request.

    Attributes:
        request: The request, already in its new status.
        token_ids: Its new tokens; none when it failed.
        logprobs: One entry per new token when they were asked for.
        error: Why it failed.
    """

    request: Request
    token_ids: list[int]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None


class SchedulerStatistics(NamedTuple):
    """The scheduler in numbers; the last four count from the start.

    Attributes:
        num_running: Requests that hold blocks.
        num_waiting: Requests that wait, preempted ones among them.
        num_steps: Batches that were scheduled.
        num_scheduled_tokens: Tokens in them.
        num_preemptions: How often a request had to give its blocks back.
        num_finished: Requests that ended, in whatever way.
        blocks: The block pool.
    """

    num_running: int
    num_waiting: int
    num_steps: int
    num_scheduled_tokens: int
    num_preemptions: int
    num_finished: int
    blocks: BlockStatistics


class Scheduler:
    """Continuous batching over one block pool.

    Args:
        config: Budgets of a step and the bound of the queue.
        blocks: The pool; the scheduler is its only user.
        draw_seed: Gives a seed to each sampled request that brings none.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockPool, draw_seed: Callable[[], int]) -> None:
        self._config, self._blocks, self._draw_seed = config, blocks, draw_seed
        self._requests: dict[str, Request] = {}
        self._waiting = FcfsQueue(config.max_num_waiting)
        self._running: dict[str, Request] = {}  # in order of arrival
        self._to_forget: list[str] = []  # ids that the runners know and should drop
        self._num_steps = self._num_scheduled_tokens = self._num_preemptions = self._num_finished = 0

    # ------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: Its id is in use, or it could never fit into the pool.
            QueueFull: Too many wait.
        """
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id!r} is in use: expected an id of its own, or none")
        self._refuse_what_never_fits(request)
        self._waiting.push(request)
        self._requests[request.request_id] = request
        if not request.sampling.is_greedy and request.sampling.seed is None:
            request.sampling = msgspec.structs.replace(request.sampling, seed=self._draw_seed())

    def finish(self, request_id: str, status: RequestStatus) -> Request | None:
        """End a request from outside; its blocks are free at once. None: it has ended already."""
        request = self._requests.get(request_id)
        if request is not None:
            self._retire(request, status)
        return request

    def preempt_all(self) -> None:
        """Take all blocks back: the KV is void, and each request computes its tokens again."""
        for request in reversed(list(self._running.values())):
            self._preempt(request)

    @property
    def is_running(self) -> bool:
        """True while a request holds blocks."""
        return bool(self._running)

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._requests)

    # ------------------------------------------------------------ a step

    def schedule(self, *, admits: bool = True) -> SchedulerOutput:
        """Decide the next batch; without tokens when nothing can run now.

        Args:
            admits: False: requests that wait go on waiting.
        """
        plan = StepPlan(self._config.max_num_batched_tokens)
        self._continue_running(plan)
        if admits and not plan.preempted:
            self._admit_waiting(plan)
        return self._commit(plan) if plan.num_scheduled_tokens else self.farewell()

    def update(self, batch: SchedulerOutput, output: ModelRunnerOutput) -> list[RequestUpdate]:
        """Take what ``batch`` sampled; requests that ended meanwhile are passed over.

        Returns:
            One update for each request that has new tokens or failed, in batch order.
        """
        rows = {request_id: row for row, request_id in enumerate(output.request_ids)}
        updates: list[RequestUpdate] = []
        for request_id in batch.num_scheduled_tokens:
            request = self._running.get(request_id)
            if request is None:
                continue
            if output.prompt_logprobs and request_id in output.prompt_logprobs:
                request.add_prompt_logprobs(output.prompt_logprobs[request_id])
            error = _find_error(request, output, rows)
            if error is not None:
                self._retire(request, RequestStatus.FINISHED_FAILED)
                updates.append(RequestUpdate(request, _NO_TOKENS, error=error))
            elif request_id in rows:
                updates.append(self._apply(request, output, rows[request_id]))
        return updates

    def lose(self, batch: SchedulerOutput) -> None:
        """The runners may not have heard of ``batch``: say again whom it told them to forget."""
        self._to_forget[:0] = batch.finished_request_ids

    def farewell(self) -> SchedulerOutput:
        """A batch without tokens that tells the runners whom to forget."""
        forgotten, self._to_forget = self._to_forget, []
        return SchedulerOutput(finished_request_ids=forgotten)

    # ------------------------------------------------------------ how a batch is decided

    def _continue_running(self, plan: StepPlan) -> None:
        for request in decodes_first(self._running):
            num_tokens = min(request.num_new_tokens, plan.budget)
            if num_tokens <= 0 or request.status is not RequestStatus.RUNNING:
                continue
            block_ids = self._grow_or_preempt(request, request.num_computed_tokens + num_tokens, plan)
            if block_ids is not None:
                plan.add(request, num_tokens, block_ids)

    def _grow_or_preempt(self, request: Request, num_tokens: int, plan: StepPlan) -> list[int] | None:
        """Blocks for ``request``, taken from later ones if need be; None: it gave way itself."""
        while (block_ids := self._blocks.grow(request.request_id, num_tokens)) is None:
            victim = latest(self._running)
            self._preempt(victim)
            plan.drop(victim)
            if victim is request:
                return None
        return block_ids

    def _preempt(self, victim: Request) -> None:
        victim.move(RequestStatus.PREEMPTED)
        victim.num_preemptions += 1
        self._num_preemptions += 1
        self._blocks.release(victim.request_id)
        del self._running[victim.request_id]
        self._forget(victim)
        victim.forget_computed()
        self._waiting.push_front(victim)

    def _admit_waiting(self, plan: StepPlan) -> None:
        while plan.budget > 0 and len(self._running) < self._config.max_num_seqs:
            request = self._waiting.head()
            # All its tokens must fit now, not only the chunk: half a prompt would soon be preempted again.
            if request is None or self._blocks.num_blocks_for(len(request.token_ids)) > self._blocks.num_free:
                return
            num_tokens = min(len(request.token_ids), plan.budget)
            block_ids = self._blocks.grow(request.request_id, num_tokens) or _NO_TOKENS
            self._waiting.remove(request)
            request.move(RequestStatus.RUNNING)
            self._running[request.request_id] = request
            plan.add(request, num_tokens, block_ids)

    def _commit(self, plan: StepPlan) -> SchedulerOutput:
        new: list[NewRequestData] = []
        cached = CachedRequestData(request_ids=[], new_token_ids=[], new_block_ids=[], num_computed_tokens=[])
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            request = self._running[request_id]
            if request.num_sent_tokens == 0:
                new.append(self._introduce(request))
            else:
                cached.request_ids.append(request_id)
                cached.new_token_ids.append(request.token_ids[request.num_sent_tokens :])
                cached.new_block_ids.append(plan.new_block_ids[request_id])
                cached.num_computed_tokens.append(request.num_computed_tokens)
            request.num_sent_tokens = len(request.token_ids)
            request.num_computed_tokens += num_tokens
        forgotten, self._to_forget = self._to_forget, []
        self._num_steps += 1
        self._num_scheduled_tokens += self._config.max_num_batched_tokens - plan.budget
        return SchedulerOutput(
            new=new, cached=cached, num_scheduled_tokens=plan.num_scheduled_tokens, finished_request_ids=forgotten
        )

    def _introduce(self, request: Request) -> NewRequestData:
        return NewRequestData(
            request_id=request.request_id,
            token_ids=request.token_ids.copy(),
            num_prompt_tokens=request.num_prompt_tokens,
            block_ids=list(self._blocks.table(request.request_id)),
            num_computed_tokens=request.num_computed_tokens,
            sampling=request.sampling,
            stop_token_ids=sorted(request.stop_token_ids),
        )

    # ------------------------------------------------------------ how its result is taken

    def _apply(self, request: Request, output: ModelRunnerOutput, row: int) -> RequestUpdate:
        taken: list[int] = []
        for token_id in output.sampled_token_ids[row]:
            taken.append(token_id)
            status = request.append(token_id)
            if status is not None:
                self._retire(request, status)
                break
        entry = output.logprobs[row] if output.logprobs is not None else None
        return RequestUpdate(request, taken, None if entry is None else (entry,))

    def _retire(self, request: Request, status: RequestStatus) -> None:
        if request.status is RequestStatus.RUNNING:
            del self._running[request.request_id]
        else:
            self._waiting.remove(request)
        request.move(status)
        self._blocks.release(request.request_id)
        self._forget(request)
        del self._requests[request.request_id]
        self._num_finished += 1

    def _forget(self, request: Request) -> None:
        if request.num_sent_tokens:
            self._to_forget.append(request.request_id)

    def _refuse_what_never_fits(self, request: Request) -> None:
        # The last token is never fed back, so it needs no slot.
        need, have = request.max_num_tokens - 1, self._blocks.num_token_slots
        if need > have:
            raise InvalidRequest(
                f"request {request.request_id} may grow to {request.max_num_tokens} tokens and the KV cache holds "
                f"{have}: expected a shorter prompt or lower max_tokens; or open the engine with more num_blocks"
            )

    # ------------------------------------------------------------ looking at it

    def statistics(self) -> SchedulerStatistics:
        """The scheduler in numbers."""
        return SchedulerStatistics(
            len(self._running),
            len(self._waiting),
            self._num_steps,
            self._num_scheduled_tokens,
            self._num_preemptions,
            self._num_finished,
            self._blocks.statistics(),
        )

    def __repr__(self) -> str:
        """As in ``<Scheduler: 3 running, 0 waiting, 120 steps, 2 preemption(s)>``."""
        return (
            f"<Scheduler: {len(self._running)} running, {len(self._waiting)} waiting, "
            f"{self._num_steps} steps, {self._num_preemptions} preemption(s)>"
        )


def _find_error(request: Request, output: ModelRunnerOutput, rows: dict[str, int]) -> str | None:
    """Why ``request`` cannot go on after this step."""
    if request.request_id in output.errors:
        return output.errors[request.request_id]
    if request.num_new_tokens <= 0 and not (
        request.request_id in rows and output.sampled_token_ids[rows[request.request_id]]
    ):
        return "the model runner returned no token for it"
    return None
