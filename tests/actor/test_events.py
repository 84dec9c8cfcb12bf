from __future__ import annotations

import pytest

from aexec.actor import (
    Actor,
    ActorSystem,
    Backoff,
    DeadLettered,
    Escalated,
    Exited,
    Restarted,
    Spawned,
    Supervision,
    handles,
)
from aexec.errors import ConfigError
from aexec.messages.base import Message

pytestmark = pytest.mark.anyio


class Break(Message[None], frozen=True):
    pass


class Mortal(Actor):
    @handles(Break)
    def fail(self, message: Break) -> None:
        raise ValueError("broken")


async def test_a_life_in_events():
    """Spawned, restarted, escalated past the top, over, and a message that came too late."""
    async with ActorSystem() as system:
        events = system.events()
        once = Supervision(max_restarts=1, backoff=Backoff(0.0, 0.0, 0.0))
        ref = await system.using(name="it", supervision=once).spawn(Mortal)
        await ref.tell(Break())
        await ref.tell(Break())
        await ref.closed()
        for _ in range(3):
            await ref.tell(Break())
    seen = [event async for event in events]
    reason = (
        "RestartsExhausted: actor it has used up its one restart within 60 s (Supervision.max_restarts, "
        "Supervision.within); its last failure: ValueError: broken"
    )
    assert seen == [
        Spawned(actor="it", parent=None),
        Restarted(actor="it", generation=2, reason="ValueError: broken"),
        Escalated(actor="it", parent=None, reason=reason),
        Exited(actor="it", how="failed", reason=reason),
        DeadLettered(actor="it", cause="closed", message="Break", so_far=1),
    ]


async def test_a_start_that_fails_is_no_life():
    """An actor that never started is neither spawned nor over."""

    class Refusing(Actor):
        async def on_start(self) -> None:
            raise ValueError("no device")

    async with ActorSystem() as system:
        events = system.events()
        with pytest.raises(ValueError, match="no device"):
            await system.spawn(Refusing)
    assert [event async for event in events] == []


async def test_nobody_listens_to_a_closed_system():
    """A stream that could never say anything is refused."""
    with pytest.raises(ConfigError, match="is not open"):
        ActorSystem().events()
