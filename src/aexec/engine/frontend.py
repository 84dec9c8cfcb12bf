"""The caller's end of a running driver: turns calls into messages. One per open engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from aexec.actor import ActorSystem, Ref
from aexec.config import SchedulerConfig
from aexec.engine.admission import RequestLimits
from aexec.engine.assembly import ModelText
from aexec.engine.blocks import BlockPool
from aexec.engine.calls import Abort, Generate, GetStatistics
from aexec.engine.driver import EngineDriver
from aexec.engine.generation import prompt_token_ids
from aexec.engine.scheduler import Scheduler, SchedulerStatistics
from aexec.engine.stream import TokenStream
from aexec.engine.text import Tokenizer
from aexec.errors import MailboxFull
from aexec.executor.base import Executor
from aexec.messages.lifecycle import ModelInfo
from aexec.messages.request import SamplingParams

__all__ = ("Frontend", "start_driver")

_HEALTH_SECONDS = 10.0
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
    """

    executor: Executor
    driver: Ref[EngineDriver]
    system: ActorSystem
    tokenizer: Tokenizer | None
    model_info: ModelInfo

    async def encode(self, prompt: object) -> tuple[object, ...]:
        """Token ids of a prompt; see :func:`prompt_token_ids`."""
        return await prompt_token_ids(prompt, self.tokenizer)

    async def submit(self, prompt: tuple[object, ...], sampling: SamplingParams, stream: TokenStream) -> None:
        """Queue a request whose tokens go to ``stream``."""
        message = Generate(request_id=stream.request_id, prompt=prompt, sampling=sampling, stream=stream)
        await self.driver.ask(message, timeout=None)

    def leave(self, stream: TokenStream) -> None:
        """Abort the request of a stream that nobody reads any longer."""
        stream.is_abandoned = True
        if self.driver.is_alive:
            with contextlib.suppress(MailboxFull):  # then the driver sees it at the request's next token
                self.driver.tell_nowait(Abort(request_id=stream.request_id, stream=stream))

    def leave_threadsafe(self, stream: TokenStream) -> None:
        """The same, from any thread and in the middle of anything: for finalizers."""
        self.system.call_soon_threadsafe(self.leave, stream)

    async def abort(self, request_id: str) -> bool:
        """End a request by its id."""
        return await self.driver.ask(Abort(request_id=request_id))

    async def statistics(self) -> SchedulerStatistics:
        """The engine in numbers."""
        return await self.driver.ask(GetStatistics())


async def start_driver(
    stack: AsyncExitStack,
    executor: Executor,
    text: ModelText,
    config: SchedulerConfig,
    *,
    max_logprobs: int,
    draw_seed: Callable[[], int],
    is_guest: bool,
) -> Frontend:
    """Ask the executor for its model, and start a driver on it; ``stack`` ends it.

    Args:
        stack: Whatever has to be ended is pushed here.
        executor: An open executor whose workers hold a model.
        text: The model's text side.
        config: Limits of a step and of the queue.
        max_logprobs: Most log-probabilities per position.
        draw_seed: Gives a seed to requests that bring none.
        is_guest: The executor outlives the driver.
    """
    infos: list[ModelInfo] = await executor.collective_rpc("model_info")
    info = infos[executor.output_rank]
    # All ranks hold the same blocks: what the least of them holds.
    blocks = BlockPool(min(each.num_blocks for each in infos), info.block_size)
    limits = RequestLimits(
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        num_token_slots=blocks.num_token_slots,
        max_logprobs=max_logprobs,
        eos_token_ids=tuple(token_id for token_id in text.eos_token_ids if token_id < info.vocab_size),
    )
    system = ActorSystem(name="engine")
    await system.open()
    stack.push_async_callback(system.aclose)
    scheduler = Scheduler(config, blocks, draw_seed)
    mailbox = config.max_num_seqs + config.max_num_waiting + _CONTROL_ROOM
    spawner = system.using(name="driver", mailbox=mailbox)
    driver = await spawner.spawn(
        EngineDriver,
        executor,
        scheduler,
        limits,
        text.tokenizer,
        last_step=await _last_step(executor),
        is_guest=is_guest,
    )
    return Frontend(executor, driver, system, text.tokenizer, info)


async def _last_step(executor: Executor) -> int:
    """Of an executor that somebody has used before; step ids only increase."""
    report = await executor.check_health(_HEALTH_SECONDS)
    return max((rank.step or 0 for rank in report.ranks), default=0)
