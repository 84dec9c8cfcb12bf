"""What type checkers make of the public API; read by mypy and pyright, and never run.

A line with an ``ignore`` has to fail, with that code: an ignore that is not needed is an
error itself.
"""

from __future__ import annotations

from typing import assert_type

from aexec import (
    Actor,
    ActorSystem,
    AsyncLLM,
    Executor,
    ExecutorConfig,
    Message,
    Ref,
    TokenChunk,
    handles,
    open_executor,
)
from aexec.messages import ForwardLaunched, StepId, StepResult
from aexec.messages.step import ExecuteModel


class Increment(Message[int], frozen=True):
    by: int = 1


class Counter(Actor):
    def __init__(self, start: int, *, name: str = "") -> None:
        self.value, self.name = start, name

    @handles(Increment)
    def increment(self, message: Increment) -> int:
        return self.value + message.by

    @handles(Increment)
    async def increment_later(self, message: Increment) -> int:
        return self.value + message.by

    @handles(Increment)  # type: ignore[arg-type]
    def wrong_reply(self, message: Increment) -> str:
        return f"{message.by}"


async def an_actor_is_spawned_with_the_arguments_of_its_class(system: ActorSystem) -> None:
    assert_type(await system.spawn(Counter, 5, name="x"), Ref[Counter])
    await system.spawn(Counter, "5")  # type: ignore[arg-type]
    await system.spawn(Counter)  # type: ignore[call-arg]


async def an_ask_has_the_type_of_the_reply(counter: Ref[Counter]) -> None:
    assert_type(await counter.ask(Increment(by=2), timeout=1.0), int)
    text: str = await counter.ask(Increment())  # type: ignore[arg-type]
    await counter.ask("increment")  # type: ignore[arg-type]
    text.upper()


async def a_stream_is_of_chunks(llm: AsyncLLM) -> None:
    async with llm:
        async for chunk in llm.generate("text"):
            assert_type(chunk, TokenChunk)
        llm.generate(5)  # type: ignore[arg-type]


async def a_step_is_launched_or_done(config: ExecutorConfig) -> None:
    async with open_executor(config) as executor:
        assert_type(executor, Executor)
        assert_type(await executor.execute_model(ExecuteModel(StepId(1))), ForwardLaunched | StepResult)
