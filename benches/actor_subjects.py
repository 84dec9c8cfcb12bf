"""What the actor bench measures: the smallest actor, and the least that asyncio needs for the same."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

from aexec.actor import Actor, ActorSystem, Message, handles

__all__ = ("Add", "AddAsync", "Bare", "Counter", "bare_idle_bytes", "end_bare", "idle_bytes", "spawn_bare")

IDLE = 2000  # actors, to see what one takes


class Add(Message[int], frozen=True):
    """Answered by a plain handler."""

    by: int = 1


class AddAsync(Message[int], frozen=True):
    """Answered by an async def that does not wait."""

    by: int = 1


class Counter(Actor):
    """As little as an actor can do."""

    def __init__(self) -> None:
        self.count = 0

    @handles(Add)
    def add(self, message: Add) -> int:
        """Count."""
        self.count += message.by
        return self.count

    @handles(AddAsync)
    async def add_async(self, message: AddAsync) -> int:
        """Count."""
        self.count += message.by
        return self.count


class Bare:
    """Two tasks and the futures that they hand each other."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.wanted: list[asyncio.Future[int]] = []
        self.wake = self.loop.create_future()
        self.task = self.loop.create_task(self.serve())

    async def serve(self) -> None:
        """Answer all that is wanted, then wait."""
        count = 0
        while True:
            await self.wake
            self.wake = self.loop.create_future()
            wanted, self.wanted = self.wanted, []
            for future in wanted:
                count += 1
                future.set_result(count)

    async def ask(self) -> int:
        """One round trip."""
        reply = self.loop.create_future()
        self.wanted.append(reply)
        if not self.wake.done():
            self.wake.set_result(None)
        return await reply


async def spawn_bare(number: int) -> list[asyncio.Task[int]]:
    """Tasks that each wait on a queue of their own."""
    tasks: list[asyncio.Task[int]] = []
    for _ in range(number):
        queue: asyncio.Queue[int] = asyncio.Queue(256)
        tasks.append(asyncio.create_task(queue.get()))
        await asyncio.sleep(0)
    return tasks


async def end_bare(tasks: list[asyncio.Task[int]]) -> None:
    """End such tasks."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def idle_bytes() -> float:
    """Bytes that Python has allocated for an actor that has answered once and waits."""
    async with ActorSystem() as system:
        refs = [await system.spawn(Counter)]
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        refs += [await system.spawn(Counter) for _ in range(IDLE)]
        for ref in refs:
            await ref.ask(Add())
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return (after - before) / IDLE


async def bare_idle_bytes() -> float:
    """The same for a task and its queue."""
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tasks = await spawn_bare(IDLE)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    await end_bare(tasks)
    return (after - before) / IDLE
