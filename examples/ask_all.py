"""Ask several actors at once, and take each reply as it comes.

Run it: ``python examples/ask_all.py``
"""

from __future__ import annotations

import asyncio

from aexec import Actor, ActorSystem, Message, handles


class Count(Message[int, "Reader"], frozen=True):
    word: str


class Reader(Actor):
    def __init__(self, text: str) -> None:
        self.words = text.split()

    @handles(Count)
    def count(self, message: Count) -> int:
        return self.words.count(message.word)


TEXTS = ("a rose is a rose", "is a rose a flower", "no flower at all")


async def main() -> None:
    async with ActorSystem() as system:
        readers = [await system.spawn(Reader, text) for text in TEXTS]
        counts = await asyncio.gather(*(reader.ask(Count("rose"), timeout=5.0) for reader in readers))
        print(f"rose: {' + '.join(map(str, counts))} = {sum(counts)}")


asyncio.run(main())
