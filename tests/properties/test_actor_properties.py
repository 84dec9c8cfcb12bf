from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aexec.actor import Actor, ActorSystem, handles
from aexec.errors import ActorDied, CallTimeout, MailboxFull
from aexec.messages.base import Message

BOUND = 3
SENDERS = 3
KINDS = ("plain", "awaits", "aside", "ready", "urgent")
VERBS = ("ask", "ask_late", "tell", "tell_nowait")


class _Work(Message[int, "Worker"], frozen=True):
    sender: int
    number: int
    fails: bool = False


class Plain(_Work, frozen=True):
    pass


class Awaits(_Work, frozen=True):
    pass


class Aside(_Work, frozen=True):
    pass


class Ready(_Work, frozen=True):
    pass


class Urgent(_Work, frozen=True):
    pass


TYPES: dict[str, type[_Work]] = dict(zip(KINDS, (Plain, Awaits, Aside, Ready, Urgent), strict=True))


class Refused(Exception):
    pass


class Worker(Actor):
    """Notes what it begins; each await of its handlers is one turn of the loop."""

    states = ("starting", "ready")

    def __init__(self) -> None:
        self.begun: list[_Work] = []

    def note(self, message: _Work) -> int:
        self.begun.append(message)
        if message.fails:
            raise Refused
        return message.number

    async def note_late(self, message: _Work) -> int:
        self.begun.append(message)
        await asyncio.sleep(0)
        if message.fails:
            raise Refused
        return message.number

    @handles(Plain)
    def plain(self, message: Plain) -> int:
        return self.note(message)

    @handles(Awaits)
    async def awaits(self, message: Awaits) -> int:
        return await self.note_late(message)

    @handles(Aside, concurrent=2)
    async def aside(self, message: Aside) -> int:
        return await self.note_late(message)

    @handles(Ready, when="ready")
    def ready(self, message: Ready) -> int:
        assert self.state == "ready"
        return self.note(message)

    @handles(Urgent, lane="urgent")
    def urgent(self, message: Urgent) -> int:
        return self.note(message)


@dataclass(frozen=True)
class Send:
    """A message, sent by a task that waits for what the verb waits for."""

    sender: int
    kind: str
    verb: str
    fails: bool = False


@dataclass(frozen=True)
class Cancel:
    """The cancellation of the task of an earlier message."""

    which: int


@dataclass(frozen=True)
class Become:
    state: str


@dataclass(frozen=True)
class Turn:
    """A turn of the loop."""


def steps(kinds: list[str]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(
            Send,
            sender=st.integers(0, SENDERS - 1),
            kind=st.sampled_from(kinds),
            verb=st.sampled_from(VERBS),
            fails=st.booleans(),
        ),
        st.builds(Cancel, which=st.integers(0, 30)),
        st.builds(Become, state=st.sampled_from(Worker.states)),
        st.just(Turn()),
    )


# Long ones, and each of some of the kinds: so that its messages meet.
scripts = st.tuples(st.integers(0, 40), st.lists(st.sampled_from(KINDS), min_size=1, unique=True)).flatmap(
    lambda drawn: st.lists(steps(drawn[1]), min_size=drawn[0], max_size=drawn[0])
)


@dataclass
class Story:
    """One run, and how each message ended for who sent it."""

    worker: Worker = field(default_factory=Worker)
    sent: list[tuple[Send, _Work]] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    ends: dict[int, list[str]] = field(default_factory=dict)

    async def send(self, ref: Any, step: Send, message: _Work) -> None:
        ends = self.ends[message.number]
        try:
            if step.verb.startswith("ask"):
                reply = await ref.ask(message, timeout=None if step.verb == "ask" else 0.0001)
                assert reply == message.number
            else:
                await ref.tell(message, timeout=None)
            ends.append("replied")
        except Refused:
            ends.append("failed")
        except CallTimeout as error:
            ends.append("started" if error.started else "never started")
        except ActorDied:
            ends.append("died")
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    def start(self, ref: Any, step: Send) -> None:
        message = TYPES[step.kind](step.sender, len(self.sent), step.fails and step.verb.startswith("ask"))
        self.sent.append((step, message))
        self.ends[message.number] = []
        if step.verb != "tell_nowait":
            self.tasks.append(asyncio.create_task(self.send(ref, step, message)))
            return
        try:
            ref.tell_nowait(message)
            self.ends[message.number].append("replied")
        except MailboxFull:
            self.ends[message.number].append("full")

    async def run(self, script: list[Any], *, finishes: bool) -> None:
        async with ActorSystem(name="properties", timeout=None) as system:
            ref = await system.using(mailbox=BOUND).spawn(lambda: self.worker)
            for step in script:
                match step:
                    case Send():
                        self.start(ref, step)
                    case Cancel(which) if which < len(self.tasks):
                        self.tasks[which].cancel()
                    case Become(state):
                        self.worker.state = state
                    case _:
                        await asyncio.sleep(0)
                now = ref.statistics().mailbox
                assert max(now.queued, now.urgent) <= BOUND, f"{now} after {step}"
            if finishes:
                self.worker.state = "ready"
                if self.tasks:
                    await asyncio.wait(self.tasks, timeout=10)
                async with asyncio.timeout(10):
                    await self.idle(ref)
            await ref.stop()
            if self.tasks:
                await asyncio.wait(self.tasks, timeout=10)
        assert all(task.done() for task in self.tasks)

    async def idle(self, ref: Any) -> None:
        while (now := ref.statistics()).mailbox.queued or now.mailbox.urgent or now.in_hand:  # noqa: ASYNC110 - as a user
            await asyncio.sleep(0)

    def check_ends(self, *, finishes: bool) -> None:
        begun = Counter(message.number for message in self.worker.begun)
        for step, message in self.sent:
            ends = self.ends[message.number]
            times = begun[message.number]
            assert len(ends) == 1 or (ends == [] and times == 0), f"{message} ended as {ends}"
            assert times <= 1, f"{message} ran {times} times"
            how = ends[0] if ends else "cancelled before it was sent"
            if how in {"full", "never started", "cancelled before it was sent"}:
                assert times == 0, f"{message} ran, and was {how}"
            if how == "failed" or (how == "replied" and (finishes or step.verb.startswith("ask"))):
                assert times == 1, f"{message} {how}, and did not run"

    def check_order(self) -> None:
        """Of one sender and lane, serial messages begin in the order in which they were sent."""
        for sender in range(SENDERS):
            for kinds in ((Plain, Awaits), (Ready,), (Aside,), (Urgent,)):
                own = [m.number for m in self.worker.begun if m.sender == sender and isinstance(m, kinds)]
                nowait = {m.number for step, m in self.sent if step.verb == "tell_nowait"}
                for group in (nowait, set(self.ends) - nowait):
                    numbers = [number for number in own if number in group]
                    assert numbers == sorted(numbers)


@given(script=scripts)
def test_messages_are_neither_lost_nor_doubled_and_keep_their_order(script):
    """However messages are sent, cancelled and postponed: each ask ends once, each runs at most once, in order."""
    story = Story()
    asyncio.run(story.run(script, finishes=True))
    story.check_ends(finishes=True)
    story.check_order()


@given(script=scripts)
def test_every_ask_ends_when_the_actor_stops(script):
    """Stopped at any point, an actor leaves no asker waiting, and runs nothing twice."""
    story = Story()
    asyncio.run(story.run(script, finishes=False))
    story.check_ends(finishes=False)
    story.check_order()


@given(numbers=st.lists(st.booleans(), min_size=1, max_size=BOUND))
def test_postponed_messages_keep_their_deadlines(numbers):
    """Asks that wait for a state end in time as never started, those without a limit run when it comes."""

    async def run() -> None:
        worker = Worker()
        async with ActorSystem(name="properties", timeout=None) as system:
            ref = await system.using(mailbox=BOUND).spawn(lambda: worker)
            asks = [
                asyncio.create_task(ref.ask(Ready(0, number), timeout=0.0005 if limited else None))
                for number, limited in enumerate(numbers)
            ]
            late = [task for task, limited in zip(asks, numbers, strict=True) if limited]
            if late:
                await asyncio.wait(late)
            ended = [task.exception() for task in late]
            assert all(isinstance(error, CallTimeout) and not error.started for error in ended)
            assert ref.statistics().mailbox.queued <= len(asks) - len(late)
            worker.state = "ready"
            others = [number for number, limited in enumerate(numbers) if not limited]
            assert await asyncio.gather(*(asks[number] for number in others)) == others
            assert [message.number for message in worker.begun] == others

    asyncio.run(run())
