"""The messages that an actor has not begun, in three lanes; pure.

* ``system``: signals (stop, failure); never bounded, and taken before anything else.
* ``urgent`` and ``normal``: messages, each lane first in first out and bounded. Who finds
  no room waits in a queue before the lane, so that order is kept per sender and lane.

A message for a ``concurrent=`` handler that has no slot free is held back for the next
one, and a message for a ``when=`` handler is postponed until its actor is in such a state:
then all that was postponed comes again, in order and before anything newer. What is held
back still takes up room, and other messages pass it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from operator import attrgetter

from aexec.actor.envelope import Envelope, Stage
from aexec.actor.lifecycle import Exit
from aexec.actor.statistics import MailboxStatistics
from aexec.actor.table import Handler

__all__ = ("Mailbox",)


_by_id = attrgetter("id")


class _Lane:
    """One bounded lane and those who wait for room in it."""

    __slots__ = ("bound", "held", "postponed", "queue", "waiting")

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.queue: deque[Envelope] = deque()
        self.held = 0  # for a slot or for a state
        self.postponed: list[Envelope] | None = None
        self.waiting: deque[Envelope] | None = None

    def __len__(self) -> int:
        return len(self.queue) + self.held

    def admit(self) -> None:
        """Let in who has waited longest, as far as there is room."""
        while self.waiting and len(self) < self.bound:
            envelope = self.waiting.popleft()
            envelope.stage = Stage.QUEUED
            self.queue.append(envelope)
            if envelope.admitted is not None and not envelope.admitted.done():
                envelope.admitted.set_result(None)

    def postpone(self, envelope: Envelope) -> None:
        """Keep a message, which counts among ``held``, for another state."""
        if self.postponed is None:
            self.postponed = []
        envelope.stage = Stage.POSTPONED
        self.postponed.append(envelope)

    def replay(self) -> list[Envelope]:
        """Put what was postponed before all that waits, in the order in which it came."""
        back, self.postponed = sorted(self.postponed or (), key=_by_id), None
        for envelope in back:
            envelope.stage = Stage.QUEUED
        if back:
            self.held -= len(back)
            self.queue = deque(sorted([*back, *self.queue], key=_by_id))
        return back


class _Slots:
    """Messages of one ``concurrent=`` handler: how many are in hand, and which are held back."""

    __slots__ = ("held", "in_hand")

    def __init__(self) -> None:
        self.in_hand = 0
        self.held: deque[Envelope] = deque()


class Mailbox:
    """The mailbox of one actor.

    Args:
        name: The actor's name.
        bound: Most messages in the normal lane, and in the urgent lane likewise.

    Attributes:
        signals: The system lane.
        state: The state of the actor, for its ``when=`` handlers; None: it has no states.
    """

    __slots__ = ("_bound", "_name", "_normal", "_slots", "_urgent", "signals", "state")

    def __init__(self, name: str, bound: int) -> None:
        self._name, self._bound = name, bound
        self._normal = _Lane(bound)
        self._urgent: _Lane | None = None  # most actors never need one, and a deque takes 760 bytes
        self._slots: dict[Handler, _Slots] | None = None
        self.signals: deque[Exit] | None = None
        self.state: str | None = None

    def __repr__(self) -> str:
        return f"<Mailbox {self.describe()}>"

    def describe(self, state: str = "") -> str:
        """As in ``worker-3: 2/64 queued, 1 system, running``."""
        now = self.statistics()
        parts = [f"{now.queued}/{now.bound} queued"]
        parts += [f"{count} {what}" for what in ("urgent", "system", "waiting") if (count := getattr(now, what))]
        parts += [f"{now.postponed} of them postponed"] if now.postponed else []
        return f"{self._name}: {', '.join([*parts, *([state] if state else [])])}"

    def statistics(self) -> MailboxStatistics:
        """How full it is."""
        lanes = [lane for lane in (self._normal, self._urgent) if lane is not None]
        return MailboxStatistics(
            queued=len(self._normal),
            urgent=len(self._urgent or ()),
            system=len(self.signals or ()),
            bound=self._bound,
            waiting=sum(len(lane.waiting or ()) for lane in lanes),
            postponed=sum(len(lane.postponed or ()) for lane in lanes),
        )

    def oldest(self) -> float | None:
        """When the oldest message that waits was sent."""
        return min((envelope.sent_at for envelope in self._all()), default=None)

    def put(self, envelope: Envelope) -> bool:
        """Take a message in; False: there is no room."""
        lane = self._normal if envelope.handler.lane == "normal" else self._urgent_lane()
        if lane.waiting or len(lane.queue) + lane.held >= lane.bound:
            return False
        lane.queue.append(envelope)
        return True

    def wait(self, envelope: Envelope) -> None:
        """Take a message in as soon as there is room, after those that wait already."""
        lane = self._lane_of(envelope)
        if lane.waiting is None:
            lane.waiting = deque()
        envelope.stage = Stage.WAITING
        lane.waiting.append(envelope)

    def signal(self, exit_: Exit) -> None:
        """Put a signal into the system lane."""
        if self.signals is None:
            self.signals = deque()
        self.signals.append(exit_)

    def pop(self, *, normal_only: bool = False) -> Envelope | None:
        """The next message to begin, or None."""
        urgent = self._urgent
        if urgent is not None and urgent.queue and not normal_only and (envelope := self._take(urgent)) is not None:
            return envelope
        return self._take(self._normal)

    def pop_urgent(self) -> Envelope | None:
        """The next message of the urgent lane, or None."""
        return None if self._urgent is None else self._take(self._urgent)

    def release(self, handler: Handler) -> Envelope | None:
        """A message of a ``concurrent=`` handler has ended: the next one to begin, if one was held back.

        While there are signals none begins; :meth:`requeue` comes after them.
        """
        assert self._slots is not None
        slots = self._slots[handler]
        while slots.held and not self.signals:
            envelope = slots.held.popleft()
            lane = self._lane_of(envelope)
            if self._is_out_of_turn(handler):
                lane.postpone(envelope)
                continue
            lane.held -= 1
            lane.admit()
            return envelope
        slots.in_hand -= 1
        return None

    def enter(self, state: str) -> list[Envelope]:
        """The actor is in ``state``; returns what was postponed, which is in the mailbox again."""
        self.state = state
        return [envelope for lane in (self._urgent, self._normal) if lane is not None for envelope in lane.replay()]

    def discard(self, envelope: Envelope) -> None:
        """Take out a message that has not begun."""
        lane = self._lane_of(envelope)
        if envelope.stage is Stage.WAITING:
            assert lane.waiting is not None
            lane.waiting.remove(envelope)
        elif envelope.stage is Stage.HELD:
            assert self._slots is not None
            self._slots[envelope.handler].held.remove(envelope)
            lane.held -= 1
        elif envelope.stage is Stage.POSTPONED:
            assert lane.postponed is not None
            lane.postponed.remove(envelope)
            lane.held -= 1
        else:
            lane.queue.remove(envelope)
        lane.admit()

    def clear(self) -> list[Envelope]:
        """Take out all messages, those that wait for room among them; signals stay."""
        envelopes = list(self._all())
        self._normal, self._urgent = _Lane(self._bound), None
        for slots in (self._slots or {}).values():
            slots.held.clear()
        return envelopes

    def requeue(self) -> None:
        """The signals are over: put those that are held back for a slot before all others, as they came."""
        self.signals = None
        held = [envelope for slots in (self._slots or {}).values() for envelope in slots.held]
        for envelope in sorted(held, key=_by_id, reverse=True):
            lane = self._lane_of(envelope)
            envelope.stage = Stage.QUEUED
            lane.queue.appendleft(envelope)
            lane.held -= 1
        for slots in (self._slots or {}).values():
            slots.held.clear()

    def _take(self, lane: _Lane) -> Envelope | None:
        while lane.queue:
            envelope = lane.queue.popleft()
            held = envelope.handler.gated and self._hold(envelope, lane)
            if lane.waiting:
                lane.admit()
            if not held:
                return envelope
        return None

    def _hold(self, envelope: Envelope, lane: _Lane) -> bool:
        """Hold a message back if it is not to begin now."""
        handler = envelope.handler
        if self._is_out_of_turn(handler):
            lane.held += 1
            lane.postpone(envelope)
            return True
        return handler.aside and not self._claim(envelope, lane)

    def _is_out_of_turn(self, handler: Handler) -> bool:
        return handler.when is not None and self.state not in handler.when

    def _claim(self, envelope: Envelope, lane: _Lane) -> bool:
        """Take a slot; False: none is free, and the message is held back."""
        if self._slots is None:
            self._slots = {}
        slots = self._slots.setdefault(envelope.handler, _Slots())
        if slots.in_hand < envelope.handler.concurrent:
            slots.in_hand += 1
            return True
        envelope.stage = Stage.HELD
        slots.held.append(envelope)
        lane.held += 1
        return False

    def _lane_of(self, envelope: Envelope) -> _Lane:
        return self._normal if envelope.handler.lane == "normal" else self._urgent_lane()

    def _urgent_lane(self) -> _Lane:
        if self._urgent is None:
            self._urgent = _Lane(self._bound)
        return self._urgent

    def _all(self) -> Iterator[Envelope]:
        for lane in (self._urgent, self._normal):
            if lane is not None:
                yield from lane.queue
                yield from lane.postponed or ()
                yield from lane.waiting or ()
        for slots in (self._slots or {}).values():
            yield from slots.held
