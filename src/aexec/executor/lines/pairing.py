"""The two halves of a step as one message, where a driver asks for both in one breath.

A worker that is woken for each half costs driver and worker more than all that they do about
a small step. So where samplings have come right behind their launches lately, a launch waits
for its sampling: within the same turn of the loop, and no longer. A driver that fills a
bitmask between the two wants the forward pass to begin at once: for it nothing waits.

The two become one ``PairedStep`` if nothing has come between them and both are surely read at
the other end; else they are two messages, which may share a datagram.
"""

from __future__ import annotations

import asyncio
from time import monotonic

from aexec.messages.step import ExecuteModel, SampleTokens, StepId
from aexec.transport import Encoded, Kind, LoopChannel, Writer
from aexec.transport.codec import can_be_paired, paired

__all__ = ("Pairing", "reorder")

_PROMPT = 50e-6  # seconds between the two, at most: what a launch may wait
_ENOUGH = 16  # steps in a row before one waits
_MESSAGE = Kind.MESSAGE  # looked up once


class Pairing:
    """Sends the halves of steps, in order.

    Args:
        writer: Of the lines.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._in_a_row = 0  # steps that were sampled right behind their launch
        self._step: StepId | None = None
        self._call, self._since = 0, 0.0
        self._holding: list[LoopChannel] = []
        self._turn: asyncio.Handle | None = None
        self._held: Encoded | None = None  # a launch that may become both halves

    def __repr__(self) -> str:
        state = "a launch waits" if self._holding else "no launch waits"
        return f"<Pairing: {self._in_a_row} samplings came right behind their launch, {state}>"

    def launch(self, lines: list[LoopChannel], call: int, message: ExecuteModel) -> bool:
        """Send a launch; True: it waits for its sampling, until the turn of the loop is over.

        Args:
            lines: Of all ranks; they may be put in an order that is better for the next time.
            call: Its call.
            message: The launch.
        """
        held = None
        if self._in_a_row >= _ENOUGH and message.num_tokens != 0:
            held = self._writer.hold(lines, _MESSAGE, call, message)
        if held is not None:
            self._holding, self._held = lines, held if can_be_paired(message, held) else None
            if self._turn is None:
                self._turn = self._loop.call_soon(self._part)
        else:
            reorder(lines, self._writer.send(lines, _MESSAGE, call, message))
        self._step, self._call, self._since = message.step, call, monotonic()
        return held is not None

    def sample(self, lines: list[LoopChannel], call: int, message: SampleTokens) -> None:
        """Send a sampling, behind the launch that waits or as one message with it; ``lines``: as for :meth:`launch`."""
        self.sampled(message.step)
        is_behind = self._turn is not None and lines is self._holding
        if is_behind and self._held is not None and self._is_one(lines, message):
            body = paired(self._held.body, call)
            eager = self._writer.send_instead(lines, _MESSAGE, self._call, self._held.codec, body)
        else:
            eager = self._writer.send(lines, _MESSAGE, call, message)
        if is_behind and self._turn is not None:  # all of them have sent what they held
            self._turn.cancel()
            self._turn, self._holding = None, []
        reorder(lines, eager)

    def sampled(self, step: StepId) -> None:
        """A sampling is sent now."""
        self._in_a_row = self._in_a_row + 1 if step == self._step and monotonic() - self._since < _PROMPT else 0

    def _is_one(self, lines: list[LoopChannel], message: SampleTokens) -> bool:
        """Nothing has come between a launch and this sampling of it, and the two are no more than they look."""
        for line in lines:
            if not line.is_holding:
                return False
        return message.step == self._step and message.grammar is None

    def _part(self) -> None:
        """The turn is over."""
        lines, self._holding, self._turn = self._holding, [], None
        self._in_a_row = 0
        for line in lines:
            line.let_go()


def reorder(lines: list[LoopChannel], eager: LoopChannel | None) -> None:
    """Send to a peer after the others from now on; see ``Writer.send``."""
    if eager is not None:
        lines.remove(eager)
        lines.append(eager)
