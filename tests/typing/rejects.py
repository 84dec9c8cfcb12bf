"""Mistakes that both type checkers have to find; never run.

A line that has to fail ends in ``# rejected: MYPY-CODE, PYRIGHT-RULE``; every other line has
to pass. ``test_rejects.py`` runs both over this file and compares.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from aexec.actor import Actor, ActorSystem, Message, Ref, RefGroup, StreamMessage, handles


class Add(Message[int, "Counter"], frozen=True):
    by: int = 1


class Anybody(Message[str], frozen=True):
    pass


class Elsewhere(Message[int, "Other"], frozen=True):
    pass


class Count(StreamMessage[int, "Counter"], frozen=True):
    pass


class Counter(Actor):
    def __init__(self, start: int) -> None:
        self.value = start

    @handles(Add)
    def add(self, message: Add) -> int:
        return self.value

    @handles(Add)  # rejected: arg-type, reportArgumentType
    def wrong_reply(self, message: Add) -> str:
        return ""

    @handles(Add)  # rejected: arg-type, reportArgumentType
    async def wrong_reply_later(self, message: Add) -> str:
        return ""

    @handles(Add)  # rejected: arg-type, reportArgumentType
    def wrong_annotation(self, message: Anybody) -> int:
        return 1

    @handles(Count)
    async def count(self, message: Count) -> AsyncIterator[int]:
        yield self.value

    @handles(Count)  # rejected: arg-type, reportArgumentType
    async def wrong_item(self, message: Count) -> AsyncIterator[str]:
        yield ""

    @handles(Count)  # rejected: arg-type, reportArgumentType
    async def no_stream(self, message: Count) -> int:
        return 1

    @handles(Add)  # rejected: arg-type, reportArgumentType
    async def a_stream(self, message: Add) -> AsyncIterator[int]:
        yield 1


class Child(Counter):
    pass


class Other(Actor):
    pass


async def of_spawning(system: ActorSystem) -> None:
    await system.spawn(Counter, 5)
    await system.spawn(Counter, "5")  # rejected: arg-type, reportArgumentType
    await system.spawn(Counter)  # rejected: call-arg, reportCallIssue
    await system.spawn(Counter, 5, color="red")  # rejected: call-arg, reportCallIssue
    await system.spawn_group(4, Counter, 5)
    await system.spawn_group(4, Counter)  # rejected: call-arg, reportCallIssue
    await system.spawn_group("4", Counter, 5)  # rejected: arg-type, reportArgumentType


async def of_asking(counter: Ref[Counter], child: Ref[Child], other: Ref[Other]) -> None:
    number: int = await counter.ask(Add())
    text: str = await counter.ask(Anybody())
    number = await child.ask(Add())
    text = await other.ask(Anybody())
    text = await counter.ask(Add())  # rejected: arg-type, reportAssignmentType
    number = await counter.ask(Anybody())  # rejected: arg-type, reportAssignmentType
    await other.ask(Add())  # rejected: arg-type, reportArgumentType
    await counter.ask(Elsewhere())  # rejected: arg-type, reportArgumentType
    await counter.ask("add")  # rejected: arg-type, reportArgumentType
    await counter.ask(Add)  # rejected: arg-type, reportArgumentType
    await counter.ask(Count())  # rejected: arg-type, reportArgumentType
    await other.tell(Add())  # rejected: arg-type, reportArgumentType
    other.tell_nowait(Add())  # rejected: arg-type, reportArgumentType
    _ = (number, text)


async def of_streams(counter: Ref[Counter], other: Ref[Other]) -> None:
    async with counter.stream(Count()) as items:
        async for item in items:
            number: int = item
            text: str = item  # rejected: assignment, reportAssignmentType
            _ = (number, text)
    other.stream(Count())  # rejected: arg-type, reportArgumentType
    counter.stream(Add())  # rejected: arg-type, reportArgumentType


async def of_groups(group: RefGroup[Counter], others: RefGroup[Other]) -> None:
    numbers: list[int] = await group.ask_all(Add())
    texts: list[str] = await group.ask_all(Anybody())
    texts = await group.ask_all(Add())  # rejected: arg-type, reportAssignmentType
    await group.ask_all(Elsewhere())  # rejected: arg-type, reportArgumentType
    await others.ask_one(0, Add())  # rejected: arg-type, reportArgumentType
    await others.tell_all(Add())  # rejected: arg-type, reportArgumentType
    await others[0].ask(Add())  # rejected: arg-type, reportArgumentType
    async for rank, reply in group.as_done(Add()):
        number: int | BaseException = reply
        text: str = reply  # rejected: assignment, reportAssignmentType
        _ = (rank, number, text)
    _ = (numbers, texts)


async def of_addresses(counter: Ref[Counter], child: Ref[Child]) -> None:
    wider: Ref[Counter] = child
    narrower: Ref[Child] = counter  # rejected: assignment, reportAssignmentType
    _ = (wider, narrower)
