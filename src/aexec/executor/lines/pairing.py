"""The two halves of a step as one datagram, where a driver asks for both in one breath.

A worker that is woken for each half costs driver and worker more than all that they do about
a small step. So where samplings have come right behind their launches lately, a launch waits
for its sampling: within the same turn of the loop, and no longer. A driver that fills a
bitmask between the two wants the forward pass to begin at once: for it nothing waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic

from aexec.messages.step import ExecuteModel, SampleTokens, StepId
from aexec.transport import Kind, LoopChannel, Writer

__all__ = ("Pairing",)

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
        self._since = 0.0
        self._holding: Sequence[LoopChannel] = ()
        self._turn: asyncio.Handle | None = None

    def __repr__(self) -> str:
        state = "a launch waits" if self._holding else "no launch waits"
        return f"<Pairing: {self._in_a_row} samplings came right behind their launch, {state}>"

    def launch(self, lines: Sequence[LoopChannel], call: int, message: ExecuteModel) -> bool:
        """Send a launch; True: it waits for its sampling, until the turn of the loop is over."""
        held = (
            self._in_a_row >= _ENOUGH and message.num_tokens != 0 and self._writer.hold(lines, _MESSAGE, call, message)
        )
        if held:
            self._holding = lines
            if self._turn is None:
                self._turn = self._loop.call_soon(self._part)
        else:
            self._writer.send(lines, _MESSAGE, call, message)
        self._step, self._since = message.step, monotonic()
        return held

    def sample(self, lines: Sequence[LoopChannel], call: int, message: SampleTokens) -> None:
        """Send a sampling, behind the launch that waits."""
        self.sampled(message.step)
        self._writer.send(lines, _MESSAGE, call, message)
        if self._turn is not None and lines is self._holding:  # all of them have sent what they held
            self._turn.cancel()
            self._turn, self._holding = None, ()

    def sampled(self, step: StepId) -> None:
        """A sampling is sent now."""
        self._in_a_row = self._in_a_row + 1 if step == self._step and monotonic() - self._since < _PROMPT else 0

    def _part(self) -> None:
        """The turn is over."""
        lines, self._holding, self._turn = self._holding, (), None
        self._in_a_row = 0
        for line in lines:
            line.let_go()
