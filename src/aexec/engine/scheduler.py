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

import itertools
from collections.abc import Callable, Iterable, Iterator

from aexec.config import SchedulerConfig
from aexec.engine.allocation import KVAllocator
from aexec.engine.batches import build_batch
from aexec.engine.blocks import BlockPool
from aexec.engine.connector.base import KVConnector
from aexec.engine.overlap import Demand
from aexec.engine.policy import StepPlan, WaitingQueue, admit, decodes_first, least
from aexec.engine.prefix import BlockHash
from aexec.engine.records import BatchRecords, RequestUpdate, ScheduledShare, check_output
from aexec.engine.request import Request, RequestStatus
from aexec.engine.samples import give_seed, leave_samples, release_followers
from aexec.engine.statistics import SchedulerStatistics
from aexec.errors import InvalidRequest
from aexec.messages.batch import KVConnectorOutput, ModelRunnerOutput, SchedulerOutput

__all__ = ("Scheduler",)

_NO_TOKENS: list[int] = []


class Scheduler:
    """Continuous batching over one block pool.

    Args:
        config: Budgets of a step and the bound of the queue.
        blocks: The pool; the scheduler is its only user.
        draw_seed: Gives a seed to each sampled request that brings none.
        prefix_caching: Requests share the KV of what they begin with.
        connector: Keeps KV blocks elsewhere.
        overlaps: A request runs on with a token that a step in flight samples.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockPool,
        draw_seed: Callable[[], int],
        *,
        prefix_caching: bool = False,
        connector: KVConnector | None = None,
        overlaps: bool = False,
    ) -> None:
        self._config, self._blocks, self._draw_seed = config, blocks, draw_seed
        self._allocator = KVAllocator(blocks, prefix_caching=prefix_caching, connector=connector)
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue(config.max_num_waiting)
        self._running: dict[str, Request] = {}  # by rank
        self._records, self._overlaps = BatchRecords(), overlaps
        self._arrivals = itertools.count()
        self._to_forget: list[str] = []  # ids that the runners know and should drop
        self._num_steps = self._num_scheduled_tokens = self._num_preemptions = self._num_finished = 0

    # ------------------------------------------------------------ requests come and go

    def add(self, *requests: Request) -> None:
        """Queue a request, or all samples of one; all of them or none.

        Raises:
            InvalidRequest: An id is in use, or a request could never fit into the pool.
            QueueFull: Too many wait.
        """
        for request in requests:
            if request.request_id in self._requests:
                raise InvalidRequest(f"request id {request.request_id!r} is in use: expected an id of its own, or none")
            self._refuse_what_never_fits(request)
        self._waiting.check_room(requests[0], len(requests))
        for request in requests:
            request.arrival = next(self._arrivals)
            give_seed(request, self._draw_seed)
            self._allocator.enroll(request)
            self._waiting.push(request)
            self._requests[request.request_id] = request

    def make_ready(self, request_id: str) -> None:
        """What a request waited for beside its turn is there: its grammar."""
        request = self._requests.get(request_id)
        if request is not None and request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            request.move(RequestStatus.WAITING)
            self._waiting.settle(request)

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
        self._allocator.reset()

    def recover(self) -> tuple[int, int]:
        """The runners are new and know nobody: every request begins afresh, with the tokens that it has.

        Returns:
            Requests that had begun, and the tokens of theirs that have to be computed again.
        """
        num_tokens = sum(request.num_computed_tokens for request in self._running.values())
        self._records.clear()
        self.preempt_all()
        self._to_forget.clear()
        begun = RequestStatus.PREEMPTED  # all of them by now, those of before too
        return sum(request.status is begun for request in self._requests.values()), num_tokens

    def reset_prefix_cache(self) -> bool:
        """Share nothing that was computed up to now; those who share it already go on; False: there is no cache."""
        self._allocator.reset(afresh=True)
        for request in self._running.values():
            self._allocator.stop_caching(request)
        return self._allocator.prefix_caching

    @property
    def connector(self) -> KVConnector | None:
        """What keeps blocks elsewhere."""
        return self._allocator.connector

    def cached_blocks(self) -> list[tuple[int, BlockHash]]:
        """The blocks that can be found by what they hold, least recently used first."""
        return self._blocks.cached_blocks()

    @property
    def is_running(self) -> bool:
        """True while a request has begun, be it that it has to begin again."""
        return bool(self._running) or self._waiting.head(has_begun=True) is not None

    @property
    def has_work(self) -> bool:
        """True while a request runs, or waits for nothing but its turn."""
        return bool(self._running) or self._waiting.head() is not None

    # ------------------------------------------------------------ a step

    def demand(self) -> Demand:
        """How many requests could run now, and how many there are with those in flight."""
        waiting = min(self._waiting.num_ready, self._config.max_num_seqs - len(self._running))
        idle = sum(1 for request in self._running.values() if self._num_due(request) > 0)
        return Demand(idle + waiting, len(self._running) + waiting)

    def schedule(
        self, *, admits: bool = True, alone: str | None = None, max_num_requests: int | None = None
    ) -> SchedulerOutput:
        """Decide the next batch; without tokens when nothing can run now.

        Args:
            admits: False: requests that have not begun go on waiting.
            alone: The id of the only request that may run; all others give their blocks back.
            max_num_requests: Requests of the batch at most; None: as many as may run.
        """
        plan = StepPlan(self._config.max_num_batched_tokens, max_num_requests)
        if alone is not None:
            self._make_way(alone)
        self._continue_running(plan)
        if not plan.preempted:
            self._admit_waiting(plan, alone, has_begun=not admits)
        return self._commit(plan) if plan.num_scheduled_tokens else self.farewell()

    def update(self, batch: SchedulerOutput, output: ModelRunnerOutput) -> list[RequestUpdate]:
        """Take what ``batch`` sampled; requests that ended meanwhile are passed over.

        Returns:
            One update for each request that has new tokens or failed, in batch order.

        Raises:
            ProtocolError: ``output`` makes no sense; nothing is taken of it.
        """
        check_output(output)
        if output.kv_connector_output is not None:
            self._take_report(output.kv_connector_output)
        rows = dict(zip(output.request_ids, itertools.count(), strict=False))
        sampled_token_ids, logprobs, errors = output.sampled_token_ids, output.logprobs, output.errors
        updates: list[RequestUpdate] = []
        shares = self._records.take(batch)
        if errors:
            self._distrust(shares, errors.keys() - output.refused)
        for share in shares:
            request = share.request
            if request.epoch != share.epoch:
                continue
            if output.prompt_logprobs:
                request.add_prompt_logprobs(share.start, output.prompt_logprobs.get(request.request_id, ()))
            row = rows.get(request.request_id) if share.is_sampled else None
            sampled = _NO_TOKENS if row is None else sampled_token_ids[row]
            error = errors.get(request.request_id) if errors else None
            if error is None and share.is_sampled and not sampled:
                error = "the model runner returned no token for it"
                self._distrust((share,), {request.request_id})
            if error is not None:
                self._retire(request, RequestStatus.FINISHED_FAILED)
                updates.append(RequestUpdate(request, _NO_TOKENS, None, error))
            elif row is not None:
                if (status := request.take(sampled)) is not None:
                    self._retire(request, status)
                entry = None if logprobs is None else logprobs[row]
                updates.append(RequestUpdate(request, request.last_news, None if entry is None else (entry,)))
        return updates

    def _take_report(self, report: KVConnectorOutput) -> None:
        """Have all that relies on blocks which could not be filled computed again."""
        for request in self._allocator.take_report(report, self._running.values()):
            self._void(request)
        for request in self._records.behind() if report.invalid_block_ids else ():
            if request.num_preemptions:  # it may have had such a block, and has others by now, or none
                self._void(request)

    def _distrust(self, shares: Iterable[ScheduledShare], request_ids: set[str]) -> None:
        """The KV that these requests computed is wrong: those who run on it begin afresh."""
        wrong = [share.request for share in shares if share.request.request_id in request_ids]
        for other in self._allocator.distrust(wrong, self._records.requests(self._running.values())):
            self._void(other)

    def get(self, request_id: str) -> Request | None:
        """The request of an id; None: it has ended, or there never was one."""
        return self._requests.get(request_id)

    def sampled(self, batch: SchedulerOutput) -> Iterator[Request]:
        """The requests that ``batch``, which is in flight, samples."""
        return self._records.sampled(batch)

    def lose(self, batch: SchedulerOutput) -> list[str]:
        """Nothing comes of ``batch``, of which the runners may not even have heard.

        Whom it told them to forget is said again, and its KV is shared no longer. Batches behind
        it that are in flight may have relied on it: what they run is computed again.

        Returns:
            The requests that it was run for, and that have neither ended nor begun again since.
        """
        lost = {share.request.request_id for share in self._records.discard(batch) if share.is_current}
        if batch.num_scheduled_tokens:
            for request in self._records.behind():
                if request.request_id not in lost:
                    self._void(request)
            self._allocator.reset()
        again = [request_id for request_id in batch.finished_request_ids if not self._is_known(request_id)]
        self._to_forget = list(dict.fromkeys([*again, *self._to_forget]))
        return [request_id for request_id in batch.num_scheduled_tokens if request_id in lost]

    def repeat(self, batch: SchedulerOutput) -> None:
        """Nothing comes of ``batch``, and it is nobody's fault: its requests compute all of theirs again."""
        for request_id in self.lose(batch):
            self._void(self._requests[request_id])

    def _is_known(self, request_id: str) -> bool:
        """The runners have been told of a request of this id since."""
        request = self._requests.get(request_id)
        return request is not None and request.num_sent_tokens > 0

    def _void(self, request: Request) -> None:
        """What steps in flight bring ``request`` is void; it begins afresh."""
        request.epoch += 1
        if request.status is RequestStatus.RUNNING:
            self._preempt(request)

    def farewell(self) -> SchedulerOutput:
        """A batch without tokens that tells the runners whom to forget."""
        forgotten, self._to_forget = self._to_forget, []
        return SchedulerOutput(finished_request_ids=forgotten)

    # ------------------------------------------------------------ how a batch is decided

    def _continue_running(self, plan: StepPlan) -> None:
        for request in decodes_first(self._running):
            if not (plan.room and plan.budget):
                return
            num_tokens = len(request.token_ids) - request.num_computed_tokens
            if request.num_placeholders:
                num_tokens = self._num_due(request)
            if num_tokens <= 0 or request.status is not RequestStatus.RUNNING:
                continue
            if num_tokens > 1:
                num_tokens = min(num_tokens, plan.budget)
            end = request.num_computed_tokens + num_tokens
            if end <= request.num_slots or self._grow_or_preempt(request, end, plan):
                plan.add(request, num_tokens)

    def _num_due(self, request: Request) -> int:
        """Tokens of a running request that may run; none while its next one is being sampled, unless steps overlap."""
        num_known = len(request.token_ids)
        if self._overlaps and request.num_placeholders:
            num_known += request.num_placeholders
            if num_known >= request.max_num_tokens:
                return 0
        return num_known - request.num_computed_tokens

    def _grow_or_preempt(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Blocks for ``request``, taken from less important ones if need be; False: it gave way itself."""
        while (block_ids := self._allocator.grow(request, num_tokens)) is None:
            victim = least(self._running)
            self._preempt(victim)
            plan.drop(victim)
            if victim is request:
                return False
        plan.new_block_ids[request.request_id] = block_ids
        return True

    def _preempt(self, victim: Request) -> None:
        victim.move(RequestStatus.PREEMPTED)
        victim.num_preemptions += 1
        self._num_preemptions += 1
        self._allocator.release(victim)
        del self._running[victim.request_id]
        self._forget(victim)
        victim.forget_computed()
        self._waiting.push(victim)

    def _make_way(self, request_id: str) -> None:
        for other in reversed(list(self._running.values())):
            if other.request_id != request_id:
                self._preempt(other)

    def _admit_waiting(self, plan: StepPlan, alone: str | None, *, has_begun: bool) -> None:
        most = self._config.max_num_seqs if alone is None else 1
        while plan.budget > 0 and plan.room and len(self._running) < most:
            request = self._waiting.head(alone, has_begun=has_begun)
            if request is None or request.num_placeholders:  # its token is on the way; it must not be sampled twice
                return
            if not (num_tokens := self._allocator.begin(request, plan.budget)):
                return
            self._waiting.remove(request)
            request.move(RequestStatus.RUNNING)
            admit(self._running, request)
            plan.add(request, num_tokens)

    def _commit(self, plan: StepPlan) -> SchedulerOutput:
        forgotten, self._to_forget = self._to_forget, []
        batch, shares, leaders = build_batch(plan, self._running, self._allocator, forgotten)
        self._records.keep(batch, shares)
        for leader in leaders:
            for follower in release_followers(leader):
                self._waiting.settle(follower)
        self._num_steps += 1
        self._num_scheduled_tokens += self._config.max_num_batched_tokens - plan.budget
        return batch

    # ------------------------------------------------------------ how its result is taken

    def _retire(self, request: Request, status: RequestStatus) -> None:
        if request.status is RequestStatus.RUNNING:
            del self._running[request.request_id]
        else:
            self._waiting.remove(request)
        request.move(status)
        request.epoch += 1
        self._allocator.release(request)
        if (successor := leave_samples(request)) is not None:
            self._waiting.settle(successor)
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
        counts = self._num_steps, self._num_scheduled_tokens, self._num_preemptions, self._num_finished
        cache = self._blocks.statistics(), self._allocator.statistics()
        return SchedulerStatistics(len(self._running), len(self._waiting), *counts, *cache)

    def __repr__(self) -> str:
        """As in ``<Scheduler: 3 running, 0 waiting, 120 steps, 2 preemption(s)>``."""
        return (
            f"<Scheduler: {len(self._running)} running, {len(self._waiting)} waiting, "
            f"{self._num_steps} steps, {self._num_preemptions} preemption(s)>"
        )
