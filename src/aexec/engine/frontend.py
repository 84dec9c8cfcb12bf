"""The caller's end of a running driver: turns calls into messages. One per open engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from anyio import fail_after

from aexec.actor import ActorSystem, Ref
from aexec.config import CacheConfig, SchedulerConfig, StructuredOutputConfig
from aexec.engine.admission import RequestLimits
from aexec.engine.assembly import ModelText
from aexec.engine.blocks import BlockPool
from aexec.engine.calls import Abort, Generate, GetStatistics, Hold
from aexec.engine.connector.attach import make_connector
from aexec.engine.connector.calls import FlushConnector
from aexec.engine.driver import EngineDriver
from aexec.engine.events import EngineEvent
from aexec.engine.generation import prompt_token_ids
from aexec.engine.grammar.manager import GrammarManager
from aexec.engine.overlap import AsyncScheduling, StepLoop, choose_loop, num_stages
from aexec.engine.replicated.driver import ReplicatedDriver
from aexec.engine.replicated.prepare import is_replicated, prepare
from aexec.engine.samples import sample_id
from aexec.engine.scheduler import Scheduler
from aexec.engine.statistics import EngineStatistics
from aexec.engine.stream import TokenStream
from aexec.engine.text import Tokenizer
from aexec.errors import AexecError, MailboxFull
from aexec.executor.base import Executor
from aexec.executor.lifecycle import ExecutorState
from aexec.messages.lifecycle import ModelInfo
from aexec.messages.request import RequestOptions, SamplingParams
from aexec.observe import get_logger
from aexec.observe.hub import EventHub

__all__ = ("Frontend", "start_driver")

_HEALTH_SECONDS = 10.0
_SETTLE_SECONDS = 1.0
_PART_SECONDS = 2.0
_CONTROL_ROOM = 64  # messages that the driver's mailbox holds beside one for each request


@dataclass(frozen=True, slots=True)
class Frontend:
    """An open engine.

    Attributes:
        executor: Runs the steps.
        driver: The actor.
        system: The actor's system.
        tokenizer: None: token ids only.
        model_info: Facts about the loaded model.
        events: What happens to the engine.
        async_scheduling: Whether steps overlap, and why.
    """

    executor: Executor
    driver: Ref[EngineDriver]
    system: ActorSystem
    tokenizer: Tokenizer | None
    model_info: ModelInfo
    events: EventHub[EngineEvent]
    async_scheduling: AsyncScheduling

    @property
    def is_replicated(self) -> bool:
        """Other ranks have engines of their own, and all have to be asked alike."""
        return is_replicated(self.executor)

    async def encode(self, prompt: object) -> tuple[object, ...]:
        """Token ids of a prompt; see :func:`prompt_token_ids`."""
        return await prompt_token_ids(prompt, self.tokenizer)

    async def submit(
        self,
        prompt: tuple[object, ...],
        sampling: SamplingParams,
        options: RequestOptions,
        streams: tuple[TokenStream, ...],
    ) -> None:
        """Queue a request; the tokens of each sample go to a stream."""
        message = Generate(
            request_id=streams[0].request_id, prompt=prompt, sampling=sampling, options=options, streams=streams
        )
        await self.driver.ask(message, timeout=None)

    def leave(self, stream: TokenStream) -> None:
        """Abort the request of a stream that nobody reads any longer."""
        stream.is_abandoned = True
        if self.driver.is_alive:
            with contextlib.suppress(MailboxFull):  # then the driver sees it at the request's next token
                self.driver.tell_nowait(Abort(request_id=sample_id(stream.request_id, stream.index), stream=stream))

    def leave_threadsafe(self, stream: TokenStream) -> None:
        """The same, from any thread and in the middle of anything: for finalizers."""
        self.system.call_soon_threadsafe(self.leave, stream)

    async def abort(self, request_id: str) -> bool:
        """End a request by its id."""
        return await self.driver.ask(Abort(request_id=request_id))

    async def statistics(self) -> EngineStatistics:
        """The engine in numbers."""
        return await self.driver.ask(GetStatistics())

    async def settle(self) -> None:
        """Let the driver see what it was told, so that a stream which was left just now is no dead letter."""
        with contextlib.suppress(AexecError):
            await self.driver.ask(GetStatistics(), timeout=_SETTLE_SECONDS)

    async def part(self) -> None:
        """End all requests on all ranks at once, so that none leaves another one in the middle of a step."""
        with contextlib.suppress(AexecError):  # the others do not come, or something has failed
            figures = await self.driver.ask(GetStatistics(), timeout=_SETTLE_SECONDS)
            is_busy = figures.num_streams or figures.steps.num_in_flight
            if is_busy and self.executor.state is ExecutorState.READY:
                await self.driver.ask(Hold(reason="closing", mode="abort"), timeout=_PART_SECONDS)

    async def flush(self, timeout: float) -> None:
        """Launch no more steps, and have the KV connector keep what the cache holds; whatever fails, this ends."""
        try:
            with fail_after(timeout):
                await self.driver.ask(Hold(reason="closing"), timeout=timeout)
                await self.driver.ask(FlushConnector(), timeout=timeout)
        except (AexecError, TimeoutError) as error:
            get_logger("aexec.engine").warning("the KV cache was not flushed, or not all of it", error=str(error))


async def start_driver(
    stack: AsyncExitStack,
    executor: Executor,
    text: ModelText,
    config: SchedulerConfig,
    cache: CacheConfig,
    structured: StructuredOutputConfig,
    *,
    max_logprobs: int,
    draw_seed: Callable[[], int],
    reseed: Callable[[int], None] | None,
    is_guest: bool,
) -> Frontend:
    """Ask the executor for its model, and start a driver on it; ``stack`` ends it.

    Args:
        stack: Whatever has to be ended is pushed here.
        executor: An open executor whose workers hold a model.
        text: The model's text side.
        config: Limits of a step and of the queue.
        cache: Whether prefixes are shared.
        structured: Limits of grammars.
        max_logprobs: Most log-probabilities per position.
        draw_seed: Gives a seed to requests that bring none.
        reseed: Makes ``draw_seed`` give what follows from a number; None: it follows from the user's.
        is_guest: The executor outlives the driver.
    """
    driver_class = ReplicatedDriver if is_replicated(executor) else EngineDriver
    if driver_class is ReplicatedDriver:
        structured = await prepare(executor, cache, structured, reseed)
    infos: list[ModelInfo] = await executor.collective_rpc("model_info")
    info = infos[executor.output_rank]
    # All ranks hold the same blocks: what the least of them holds.
    blocks = BlockPool(min(each.num_blocks for each in infos), info.block_size)
    limits = _limits(info, text, blocks.num_token_slots, max_logprobs)
    loop = _loop_for(executor, infos, config)
    scheduler = Scheduler(
        config,
        blocks,
        draw_seed,
        prefix_caching=cache.prefix_caching,
        connector=make_connector(cache),
        overlaps=loop.overlaps,
    )
    grammars = await _start_grammars(stack, structured, text, limits, scheduler)
    system, events = await _start_system(stack)
    mailbox = config.max_num_seqs + config.max_num_waiting + _CONTROL_ROOM
    driver = await system.using(name="driver", mailbox=mailbox).spawn(
        driver_class,
        executor,
        scheduler,
        limits,
        text.tokenizer,
        masks=grammars,
        loop=loop,
        last_step=await _last_step(executor),
        recovery_timeout=config.recovery_timeout,
        events=events,
        is_guest=is_guest,
    )
    frontend = Frontend(executor, driver, system, text.tokenizer, info, events, loop.async_scheduling)
    _end_well(stack, frontend, scheduler)
    return frontend


async def _start_system(stack: AsyncExitStack) -> tuple[ActorSystem, EventHub[EngineEvent]]:
    system = ActorSystem(name="engine")
    await system.open()
    stack.push_async_callback(system.aclose)
    events = EventHub[EngineEvent]()
    stack.callback(events.close)
    return system, events


def _end_well(stack: AsyncExitStack, frontend: Frontend, scheduler: Scheduler) -> None:
    """What has to be done while the driver still runs."""
    stack.push_async_callback(frontend.settle)
    if frontend.is_replicated:
        stack.push_async_callback(frontend.part)
    if scheduler.connector is not None and scheduler.connector.flush_timeout:
        stack.push_async_callback(frontend.flush, scheduler.connector.flush_timeout)


def _loop_for(executor: Executor, infos: Sequence[ModelInfo], config: SchedulerConfig) -> StepLoop:
    return choose_loop(
        config.async_scheduling,
        stages=num_stages(executor.world_size, executor.output_rank),
        resolves_placeholders=all(each.resolves_placeholders for each in infos),
    )


def _limits(info: ModelInfo, text: ModelText, num_token_slots: int, max_logprobs: int) -> RequestLimits:
    return RequestLimits(
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        num_token_slots=num_token_slots,
        max_logprobs=max_logprobs,
        eos_token_ids=tuple(token_id for token_id in text.eos_token_ids if token_id < info.vocab_size),
    )


async def _start_grammars(
    stack: AsyncExitStack,
    config: StructuredOutputConfig,
    text: ModelText,
    limits: RequestLimits,
    scheduler: Scheduler,
) -> GrammarManager:
    grammars = GrammarManager(
        config,
        text.tokenizer,
        vocab_size=limits.vocab_size,
        end_token_ids=limits.eos_token_ids,
        find=scheduler.get,
        finish=scheduler.finish,
    )
    stack.push_async_callback(grammars.aclose)
    await grammars.preload()
    return grammars


async def _last_step(executor: Executor) -> int:
    """Of an executor that somebody has used before; step ids only increase."""
    report = await executor.check_health(_HEALTH_SECONDS)
    return max((rank.step or 0 for rank in report.ranks), default=0)
