from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aexec.actor.envelope import Envelope, Stage
from aexec.actor.mailbox import Mailbox
from aexec.actor.table import Handler
from aexec.messages.base import Message

STATES = ("starting", "ready", "draining")


class Work(Message[None], frozen=True):
    pass


@dataclass
class Hop:
    name: str = "worker"
    address: str = "test/worker"
    generation: int = 1


def handler(lane="normal", concurrent=1, when=()) -> Handler:
    states = frozenset(when) or None
    return Handler(Work, "work", lambda _, __: None, concurrent > 1, lane, concurrent, shield=False, when=states)


HANDLERS = (
    handler(),
    handler("urgent"),
    handler(concurrent=2),
    handler("urgent", concurrent=2),
    handler(when=("ready",)),
    handler("urgent", when=("ready", "draining")),
    handler(concurrent=2, when=("draining",)),
)


class MailboxMachine(RuleBasedStateMachine):
    """A mailbox beside a list of what should be in it."""

    @initialize(bound=st.integers(1, 4), handlers=st.lists(st.sampled_from(HANDLERS), min_size=1, unique=True))
    def make(self, bound, handlers):
        self.bound, self.handlers = bound, handlers  # some of them: so that they meet more often
        self.mailbox = Mailbox("worker", bound)
        self.mailbox.enter(STATES[0])
        self.ids = itertools.count()
        self.inside: list[Envelope] = []
        self.begun: list[Envelope] = []
        self.in_hand: Counter[Handler] = Counter()

    @rule(data=st.data(), waits=st.booleans(), times=st.integers(1, 3))
    def send(self, data, waits, times):
        handler = data.draw(st.sampled_from(self.handlers))
        for _ in range(times):
            envelope = Envelope(next(self.ids), Work(), handler, Hop(), 0.0, None, None)
            had_room = self.room(handler.lane) > 0
            assert self.mailbox.put(envelope) is had_room
            if had_room:
                self.inside.append(envelope)
            elif waits:
                self.mailbox.wait(envelope)
                self.inside.append(envelope)

    @rule(urgent_only=st.booleans(), normal_only=st.booleans(), times=st.integers(1, 3))
    def take(self, urgent_only, normal_only, times):
        for _ in range(times):
            envelope = self.mailbox.pop_urgent() if urgent_only else self.mailbox.pop(normal_only=normal_only)
            if envelope is not None:
                self.begin(envelope)

    @precondition(lambda self: any(self.in_hand.values()))
    @rule(data=st.data())
    def end(self, data):
        handler = data.draw(st.sampled_from([handler for handler in HANDLERS if self.in_hand[handler]]))
        self.in_hand[handler] -= 1
        envelope = self.mailbox.release(handler)
        if envelope is not None:
            self.begin(envelope)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def discard(self, data):
        envelope = data.draw(st.sampled_from(self.inside))
        self.mailbox.discard(envelope)
        self.inside.remove(envelope)

    @rule(state=st.sampled_from(STATES))
    def enter(self, state):
        self.mailbox.enter(state)

    def teardown(self):
        if hasattr(self, "mailbox"):
            assert sorted(self.mailbox.clear(), key=id) == sorted(self.inside, key=id)
            assert self.mailbox.statistics()[:3] == (0, 0, 0)

    def begin(self, envelope):
        handler = envelope.handler
        assert envelope in self.inside, "begun twice, or after it was taken out"
        self.inside.remove(envelope)
        assert handler.when is None or self.mailbox.state in handler.when
        older = [other for other in self.inside if other.id < envelope.id and other.handler.lane == handler.lane]
        assert not [other for other in older if other.handler is handler], "a later message of a kind came first"
        assert handler.gated or not [other for other in older if not other.handler.gated]
        if handler.aside:
            self.in_hand[handler] += 1
            assert self.in_hand[handler] <= handler.concurrent

    def room(self, lane: str) -> int:
        return self.bound - sum(envelope.handler.lane == lane for envelope in self.inside)

    @invariant()
    def nothing_is_lost_or_doubled(self):
        assert Counter(map(id, self.mailbox._all())) == Counter(map(id, self.inside))

    @invariant()
    def the_bound_holds(self):
        now = self.mailbox.statistics()
        stages = Counter((envelope.handler.lane, envelope.stage is Stage.WAITING) for envelope in self.inside)
        assert (now.queued, now.urgent) == (stages["normal", False], stages["urgent", False])
        assert now.waiting == stages["normal", True] + stages["urgent", True]
        assert max(now.queued, now.urgent) <= self.bound
        for lane, count in (("normal", now.queued), ("urgent", now.urgent)):
            assert not stages[lane, True] or count == self.bound, "there is room, and somebody waits for it"


TestMailbox = MailboxMachine.TestCase
# Runs are cheap, and many of them never get to where it matters.
TestMailbox.settings = settings(max_examples=max(settings.default.max_examples, 400))
