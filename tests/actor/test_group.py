from __future__ import annotations

import time

import anyio
import anyio.lowlevel
import pytest

from aexec.actor import Actor, RefGroup, handles
from aexec.errors import ActorDied, ActorStopped, CallCycle, CallTimeout, ConfigError, MailboxFull, UnhandledMessage
from aexec.messages.base import Message

pytestmark = pytest.mark.anyio


class WhoAmI(Message[tuple[int, int], "Worker"], frozen=True):
    pass


class Seen(Message[int, "Worker"], frozen=True):
    """Replies with the identity of the message object."""


class Work(Message[int, "Worker"], frozen=True):
    pass


class Collective(Message[int, "Worker"], frozen=True):
    pass


class Wait(Message[None, "Worker"], frozen=True):
    pass


class Fail(Message[int, "Worker"], frozen=True):
    ranks: tuple[int, ...]


class AskAll(Message[list[tuple[int, int]], "Worker"], frozen=True):
    pass


class Unknown(Message[None], frozen=True):
    pass


class Board:
    """Lets a test hold each rank."""

    def __init__(self) -> None:
        self.gates = [anyio.Event() for _ in range(4)]
        self.log: list[str] = []
        self.group: RefGroup[Worker] | None = None
        self.stalled_rank: int | None = None

    async def work(self, rank: int) -> int:
        self.log.append(f"begin {rank}")
        if rank == self.stalled_rank:
            stand_still(0.8)
        try:
            await self.gates[rank].wait()
        except BaseException:
            self.log.append(f"cancel {rank}")
            raise
        self.log.append(f"end {rank}")
        return rank * 10

    async def logged(self, *lines: str) -> None:
        with anyio.fail_after(5):
            while not set(lines) <= set(self.log):
                await anyio.lowlevel.checkpoint()


def stand_still(seconds: float) -> None:
    """Hold the loop, as a machine does that is taken away for a moment."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


class Worker(Actor):
    def __init__(self, board: Board) -> None:
        self.board = board

    @handles(WhoAmI)
    def who(self, message: WhoAmI) -> tuple[int, int]:
        return self.context.rank, self.context.size

    @handles(Seen)
    def seen(self, message: Seen) -> int:
        return id(message)

    @handles(Work)
    async def work(self, message: Work) -> int:
        return await self.board.work(self.context.rank)

    @handles(Collective, shield=True)
    async def collective(self, message: Collective) -> int:
        return await self.board.work(self.context.rank)

    @handles(Wait)
    async def wait(self, message: Wait) -> None:
        await self.board.gates[self.context.rank].wait()

    @handles(Fail)
    async def fail(self, message: Fail) -> int:
        if self.context.rank in message.ranks:
            raise LookupError(f"rank {self.context.rank} is broken")
        return await self.board.work(self.context.rank)

    @handles(AskAll)
    async def ask_all(self, message: AskAll) -> list[tuple[int, int]]:
        assert self.board.group is not None
        return await self.board.group.ask_all(WhoAmI())


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
async def group(system, board):
    board.group = await system.using(name="tp", mailbox=1).spawn_group(4, Worker, board)
    return board.group


# ---------------------------------------------------------------- made


async def test_members_know_their_rank(system, group):
    """A spawned group is in rank order, and each member knows its place."""
    assert await group.ask_all(WhoAmI()) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert [ref.name for ref in group] == ["tp[0]", "tp[1]", "tp[2]", "tp[3]"]
    assert (len(group), group[1].name, group[-1].name) == (4, "tp[1]", "tp[3]")
    assert repr(group) == "<RefGroup tp: 4 ranks, 4 alive>"
    alone = await system.spawn(Worker, Board())
    assert await alone.ask(WhoAmI()) == (0, 1)


async def test_a_group_may_be_made_of_refs(group):
    """The position is the rank; groups of the same refs are equal."""
    pair = RefGroup.of([group[2], group[0]])
    assert await pair.ask_all(WhoAmI()) == [(2, 4), (0, 4)]
    assert RefGroup.of(iter(group)) == group
    assert len({RefGroup.of(group), group}) == 1


async def test_a_group_has_a_member(system):
    """An empty group is refused."""
    with pytest.raises(ConfigError, match="a group has at least one"):
        RefGroup.of([])
    with pytest.raises(ConfigError, match="size is 0"):
        await system.spawn_group(0, Worker, Board())


async def test_members_start_together_or_not_at_all(system):
    """They start at the same time; when one does not, its error is raised and none is left."""
    events: list[str] = []
    all_in = anyio.Event()

    class Member(Actor):
        def __init__(self, faulty: int) -> None:
            self.faulty = faulty

        async def on_start(self) -> None:
            events.append("in")
            if len(events) == 3:
                all_in.set()
            await all_in.wait()
            if self.context.rank == self.faulty:
                raise LookupError("no device")

    good = await system.spawn_group(3, Member, 5)
    await good.stop()
    events.clear()
    with pytest.raises(LookupError, match="no device"):
        await system.spawn_group(3, Member, 1)
    assert system.statistics().actors == 0


async def test_a_cancelled_spawn_leaves_no_member(system):
    """When the spawner goes, all members end."""

    class Slow(Actor):
        async def on_start(self) -> None:
            if self.context.rank:
                await anyio.sleep_forever()

    with anyio.move_on_after(0.01) as scope:
        await system.spawn_group(2, Slow)
    assert scope.cancelled_caught
    assert system.statistics().actors == 0


# ---------------------------------------------------------------- asked


async def test_all_ranks_get_the_same_object(group):
    """One message object is shared by all ranks."""
    assert len(set(await group.ask_all(Seen()))) == 1


async def test_replies_are_in_rank_order(group, board):
    """However the ranks finish, the replies stand in rank order."""
    replies: list[int] = []
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            replies.extend(await group.ask_all(Work()))

        tasks.start_soon(ask)
        for rank in (2, 0, 3, 1):
            board.gates[rank].set()
            await board.logged(f"end {rank}")
    assert replies == [0, 10, 20, 30]


async def test_the_first_error_of_any_rank_is_raised_at_once(group, board):
    """Rank 2 fails while the others run: its error comes at once, with what they do as a note."""
    board.gates[0].set()
    with pytest.raises(LookupError, match="rank 2 is broken") as caught:
        await group.ask_all(Fail((2,)))
    (_, note) = caught.value.__notes__
    assert note.startswith("raised for rank 2 of Fail to tp; rank 0 ")
    assert "rank 3 its handler runs" in note
    await board.logged("cancel 1", "cancel 3")


async def test_a_dead_rank_is_an_error_before_anything_begins(group, board):
    """With a dead rank no other begins."""
    await group[3].stop()
    with pytest.raises(ActorStopped, match=r"tp\[3\]"):
        await group.ask_all(Work())
    assert await group[0].ask(WhoAmI()) == (0, 4)
    assert board.log == []


async def test_a_rank_that_dies_meanwhile_ends_the_call(group, board):
    """The death of a rank is raised at once, whatever the others do."""
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(ActorDied, match=r"tp\[1\]"):
                await group.ask_all(Work())

        tasks.start_soon(ask)
        await board.logged("begin 0", "begin 1", "begin 2", "begin 3")
        group[1]._cell.broke(ValueError("lost its device"))
    await board.logged("cancel 0", "cancel 2", "cancel 3")


@pytest.mark.usefixtures("virtual_clock")
async def test_one_budget_holds_for_all_ranks(group, board):
    """When the time is up the call ends once, and says what each rank does."""
    board.gates[0].set()
    with pytest.raises(CallTimeout, match=r"Work to tp passed its limit of 0\.02 s") as caught:
        await group.ask_all(Work(), timeout=0.02)
    assert caught.value.started
    assert caught.value.__notes__ == [
        "rank 0 has answered; rank 1 its handler runs; rank 2 its handler runs; rank 3 its handler runs"
    ]
    await board.logged("cancel 1", "cancel 2", "cancel 3")
    with pytest.raises(CallTimeout) as caught:
        await group.ask_all(Work(), timeout=0)
    assert not caught.value.started


async def test_what_no_rank_has_begun_is_taken_back_from_all(group, board):
    """A call that ends before any rank has begun runs nowhere, shielded or not."""
    await group.tell_all(Wait())
    await anyio.wait_all_tasks_blocked()
    with pytest.raises(CallTimeout) as caught:
        await group.ask_all(Collective(), timeout=0.01)
    assert not caught.value.started
    for gate in board.gates:
        gate.set()
    await group.ask_all(WhoAmI())
    assert board.log == []


@pytest.mark.usefixtures("virtual_clock")
async def test_a_collective_that_one_rank_has_begun_is_run_by_all(system, group, board):
    """A shielded handler that one rank is in is begun and finished by the others, though nobody waits."""
    for rank in (1, 2, 3):
        group[rank].tell_nowait(Wait())
    await anyio.wait_all_tasks_blocked()
    with pytest.raises(CallTimeout):
        await group.ask_all(Collective(), timeout=0.01)
    assert board.log == ["begin 0"]
    for gate in board.gates:
        gate.set()
    await board.logged("end 0", "end 1", "end 2", "end 3")
    assert await group.ask_all(WhoAmI())
    assert system.statistics().late_replies == 4


async def test_a_collective_that_one_rank_has_begun_is_begun_by_those_whose_turn_comes_too_late(group, board):
    """The deadline has passed before they could look at it: the first would be alone in the collective."""
    board.stalled_rank = 0
    with pytest.raises(CallTimeout, match="Collective to tp passed its limit") as caught:
        await group.ask_all(Collective(), timeout=0.7)  # by then the first has begun, if the machine stands still too
    assert caught.value.started
    for gate in board.gates:
        gate.set()
    await board.logged("end 0", "end 1", "end 2", "end 3")


async def test_what_comes_too_late_for_all_is_begun_by_none(system, group, board):
    """And the error is the call's, however one waits for it, and not a rank's."""
    for message in (Work(), Collective()):
        done = group.as_done(message, timeout=0.01)
        stand_still(0.03)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(CallTimeout, match=r"to tp passed its limit of 0\.01 s") as caught:
            await anext(done)
        assert not caught.value.started
        assert caught.value.__notes__ == ["; ".join(f"rank {rank} has not begun" for rank in range(4))]
    await group.ask_all(WhoAmI())
    assert board.log == []
    assert system.statistics().dead_letters.expired + system.statistics().dead_letters.cancelled == 8


async def test_a_cancelled_call_is_given_up_on_all_ranks(group, board):
    """Cancelling the caller cancels the handlers."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(group.ask_all, Work())
        await board.logged("begin 0", "begin 1", "begin 2", "begin 3")
        tasks.cancel_scope.cancel()
    await board.logged("cancel 0", "cancel 1", "cancel 2", "cancel 3")


async def test_a_group_call_in_a_circle_is_an_error(group):
    """A member that asks its own group is told so, instead of waiting for itself."""
    with pytest.raises(CallCycle):
        await group[0].ask(AskAll())


async def test_a_message_without_handler_is_refused_at_once(group):
    """No rank runs what one of them has no handler for."""
    with pytest.raises(UnhandledMessage):
        await group.ask_all(Unknown())


async def test_one_rank_answers_for_all(group, board):
    """ask_one runs on all ranks and returns the reply of one; the others go on."""
    board.gates[2].set()
    assert await group.ask_one(2, Work()) == 20
    await board.logged("begin 0", "begin 1", "begin 3")
    assert "cancel 0" not in board.log
    for gate in board.gates:
        gate.set()
    await board.logged("end 0", "end 1", "end 3")


async def test_another_ranks_error_is_not_swallowed(group):
    """ask_one raises the error of a rank that does not answer."""
    with pytest.raises(LookupError, match="rank 3 is broken"):
        await group.ask_one(0, Fail((3,)))


async def test_ranks_that_go_on_keep_the_deadline(group, board, virtual_clock):
    """What still runs after ask_one's answer is ended by the deadline of the call."""
    board.gates[0].set()
    assert await group.ask_one(0, Work(), timeout=0.05) == 0
    assert "cancel 1" not in board.log
    await virtual_clock.advance(0.05)
    assert set(board.log) >= {"cancel 1", "cancel 2", "cancel 3"}


async def test_there_is_no_rank_beyond_the_group(group, board):
    """A rank that is not there is refused before anything is sent; -1 is the last."""
    with pytest.raises(IndexError):
        await group.ask_one(4, Work())
    assert board.log == []
    assert await group.ask_one(-1, WhoAmI()) == (3, 4)


async def test_replies_can_be_taken_as_they_come(group, board):
    """as_done yields rank and reply in the order in which they come, errors among them."""
    seen: list[int] = []
    async for rank, reply in group.as_done(Fail((1,))):
        seen.append(rank)
        if rank == 1:
            assert isinstance(reply, LookupError)
            board.gates[3].set()
        else:
            assert reply == rank * 10
            board.gates[{3: 0, 0: 2, 2: 2}[rank]].set()
    assert seen == [1, 3, 0, 2]


async def test_leaving_early_gives_up_the_rest(group, board):
    """Leaving the block of as_done cancels what has not come; its repr tells how far it is."""
    board.gates[1].set()
    async with group.as_done(Work()) as done:
        assert await anext(done) == (1, 10)
        assert repr(done) == "<AsDone Tally Work to tp: 1/4 have come>"
    await board.logged("cancel 0", "cancel 2", "cancel 3")
    with pytest.raises(CallTimeout):
        async for _ in group.as_done(Work(), timeout=0.01):
            pass


async def test_a_second_task_is_refused_and_the_first_goes_on(group, board):
    """Of two tasks that wait for a reply one would never be told of it, so the later one hears so at once."""
    got: list[tuple[int, int | BaseException]] = []
    async with group.as_done(Work()) as done, anyio.create_task_group() as tasks:

        async def take() -> None:
            got.append(await anext(done))

        tasks.start_soon(take)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(anyio.BusyResourceError, match="already waiting for the replies to Work to tp"):
            await anext(done)
        board.gates[2].set()
    assert got == [(2, 20)]


async def test_who_waits_is_told_when_the_block_is_left(group):
    """What was given up comes no more, and nobody waits for it: neither another task nor a later one."""
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks, group.as_done(Work(), timeout=None) as done:

            async def take() -> None:
                with pytest.raises(RuntimeError, match="Work to tp that had not come were given up"):
                    await anext(done)

            tasks.start_soon(take)
            await anyio.wait_all_tasks_blocked()
        with pytest.raises(RuntimeError, match="were given up"):
            await anext(done)


# ---------------------------------------------------------------- told, and ended


async def test_tell_all_waits_for_room_in_all_mailboxes(group, board):
    """tell_all returns when each rank has the message."""
    await group.tell_all(Wait())
    await anyio.wait_all_tasks_blocked()
    await group.tell_all(Work())
    with pytest.raises(CallTimeout):
        await group.tell_all(Work(), timeout=0.01)
    assert [ref.statistics().mailbox.waiting for ref in group] == [0, 0, 0, 0]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(group.tell_all, Work())
        await anyio.wait_all_tasks_blocked()
        for gate in reversed(board.gates):
            gate.set()
    await group.ask_all(WhoAmI())
    assert sorted(board.log) == sorted(f"{what} {rank}" for what in ("begin", "end") for rank in range(4) for _ in "12")


async def test_the_bound_holds_for_a_group(group):
    """A mailbox that is full stays so."""
    await group.tell_all(Wait())
    await anyio.wait_all_tasks_blocked()
    await group.tell_all(WhoAmI())
    with pytest.raises(MailboxFull):
        group[0].tell_nowait(WhoAmI())
    await group.stop(timeout=0.01)  # its handlers would wait for the whole time to stop


async def test_a_group_ends_together(group):
    """stop() ends all members, and says how each ended."""
    exits = await group.stop()
    assert [exit_.kind for exit_ in exits] == ["stopped"] * 4
    assert repr(group) == "<RefGroup tp: 4 ranks, 0 alive>"
