"""Two actors that send a ball to and fro, each by asking the other's address it was given.

Run it: ``python examples/ping_pong.py``
"""

from __future__ import annotations

import asyncio

from aexec import Actor, ActorSystem, Message, handles


class Ball(Message[int, "Player"], frozen=True):
    hits: int


class Player(Actor):
    def __init__(self, name: str) -> None:
        self.name = name

    @handles(Ball)
    def hit(self, message: Ball) -> int:
        print(f"{self.name} hits it, {message.hits} before")
        return message.hits + 1


async def main() -> None:
    async with ActorSystem() as system:
        players = [await system.spawn(Player, name) for name in ("ping", "pong")]
        hits = 0
        while hits < 4:
            hits = await players[hits % 2].ask(Ball(hits))
        print(f"{hits} hits")


asyncio.run(main())
