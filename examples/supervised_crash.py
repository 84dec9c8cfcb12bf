"""Two workers share one fate: one fails, both begin again, and messages that waited are handled then.

Run it: ``python examples/supervised_crash.py``
"""

from __future__ import annotations

import asyncio
import logging

from aexec import Actor, ActorSystem, Message, Ref, handles
from aexec.actor import Backoff, Supervision

logging.getLogger("aexec").setLevel(logging.CRITICAL + 1)  # each failure is logged, with its traceback


class Work(Message[None], frozen=True):
    amount: int


class Report(Message[str], frozen=True):
    pass


class Worker(Actor):
    def __init__(self) -> None:
        self.done = 0

    @handles(Work)
    def work(self, message: Work) -> None:
        if message.amount < 0:
            raise ValueError("there is no negative work")
        self.done += message.amount

    @handles(Report)
    def report(self, _: Report) -> str:
        return f"{self.context.ref.name}, generation {self.context.generation}: {self.done} done"


async def show(*workers: Ref[Worker]) -> None:
    for worker in workers:
        print(await worker.ask(Report(), timeout=5.0))


async def main() -> None:
    together = Supervision(strategy="one_for_all", max_restarts=3, within=60.0, backoff=Backoff(initial=0.01))
    async with ActorSystem() as system:
        left, right = [await system.using(name=name, supervision=together).spawn(Worker) for name in ("left", "right")]
        await left.tell(Work(2))
        await right.tell(Work(3))
        await show(left, right)
        await left.tell(Work(-1))
        await left.tell(Work(5))
        await show(left, right)


asyncio.run(main())
