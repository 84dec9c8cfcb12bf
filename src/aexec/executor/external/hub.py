"""The middle of a replica: compares what its ranks ask for, and hands their outcomes on.

It lives in the process of the replica's first rank, which it reaches as it reaches the others
(:mod:`aexec.executor.external.seats`). What concerns all replicas it hands on to rank 0's hub,
and that one to those of the other replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import anyio

from aexec.errors import AexecError, ChannelFull, PeerLost, RanksDiverged, WorkerDied
from aexec.executor.external.lockstep import Gathering, result_of
from aexec.executor.external.release import Agreed, Forward, Release
from aexec.executor.external.seats import LineSeat, LocalSeat, Seat
from aexec.executor.external.verdicts import reads_nothing
from aexec.executor.external.wire import PeerLine
from aexec.messages.control import Hello
from aexec.messages.peers import (
    Answered,
    Asked,
    Assembled,
    Called,
    Cards,
    Departed,
    Departing,
    Farewell,
    Lost,
    Parted,
    Present,
    Seated,
    Whereabouts,
    pack_call,
    unpack_call,
)
from aexec.parallel.layout import RankLayout
from aexec.transport import Encoded, Frame, Kind, Writer

__all__ = ("HUB", "NOT_READY", "Hub")

HUB: Final = -1  #: The rank that stands for the hub itself in what is asked.
NOT_READY: Final = "its worker is not there yet"  #: Where a rank is before all are.
_DOUBT = 0.1  # seconds that ranks which differ wait for the others' calls, to tell who is the odd one
_TELL_AFTER = 0.002  # seconds in which a reply of another rank may tell that a call was made by all
_REPLY, _FAILURE, _MESSAGE, _EVENT = Kind.REPLY, Kind.FAILURE, Kind.MESSAGE, Kind.EVENT


class Hub:
    """The hub of one replica.

    Args:
        rank: Of this process, counted over all replicas; the first of its replica.
        layout: Of all replicas.
        own: This process's seat.
        writer: This process's.
        check: Ranks say what they call, and it is compared.
    """

    def __init__(self, rank: int, layout: RankLayout, own: LocalSeat, writer: Writer, *, check: bool) -> None:
        self._first, self._layout, self._writer, self._check = rank, layout, writer, check
        ranks = range(layout.replica_size)
        self._own = own
        self._seats: dict[int, Seat] = {own.rank: own}
        self._lines: list[LineSeat] = []
        self._above: PeerLine | None = None
        self._beside: dict[int, PeerLine] = {}
        self._release = Release(ranks)
        self.lockstep = self._release.lockstep
        self._telling: asyncio.TimerHandle | None = None
        self._cards, self._hellos = Gathering[Any](ranks), Gathering[Hello](ranks)
        self._all_cards: dict[int, list[Any]] = {}
        self._keys = Gathering[list[str]](ranks)
        self._lost: set[int] = set()
        self._doubt: asyncio.TimerHandle | None = None
        self._changed = anyio.Event()
        self._is_parted = self._is_over = self._have_met = False
        self._heard: dict[type[Any], Callable[[Seat, Any], None]] = {
            Cards: self._on_cards,
            Present: self._on_present,
            Asked: self._on_asked,
            Answered: self._on_answered,
            Lost: lambda _, message: self.lose(message),
            Parted: lambda _, message: self.part(message.error),
            Departing: self._on_departing,
        }

    def __repr__(self) -> str:
        return f"<Hub of ranks {self._first}+{len(self._seats)}: {self.lockstep!r}, {self.num_held} held>"

    @property
    def num_held(self) -> int:
        """Replies that wait for all ranks to make their call."""
        return self._release.num_held

    @property
    def missing_cards(self) -> list[int]:
        """Ranks of all replicas that have not come, as far as this hub knows."""
        missing = [self._first + rank for rank in self._cards.missing if rank] if self._cards.round == 1 else []
        if self._first == 0:
            firsts = range(self._layout.replica_size, self._layout.size, self._layout.replica_size)
            missing += [first for first in firsts if first not in self._all_cards]
        return missing

    # Lines.

    def seat(self, line: PeerLine, pid: int) -> None:
        """A rank of this replica has come."""
        seat = LineSeat(line.rank - self._first, line, pid)
        self._seats[seat.rank] = seat
        self._lines.append(seat)

    def seat_hub(self, line: PeerLine) -> None:
        """The hub of another replica has come; on rank 0."""
        self._beside[line.rank] = line

    def hang_below(self, line: PeerLine) -> None:
        """This hub has come to that of rank 0."""
        self._above = line

    def frame(self, line: PeerLine, frame: Frame) -> None:
        """A frame has come by one of the lines."""
        if line is self._above or line.rank in self._beside:
            if not isinstance(frame.value, Seated):
                self._on_other_hub(line, frame.value)
            return
        seat = self._seats[line.rank - self._first]
        if frame.error is not None:
            if frame.call:
                self._spread_failure(frame.call, frame.error, HUB)
        else:
            self.hear(seat, frame.kind, frame.call, frame.value)

    def gone(self, line: PeerLine, why: str) -> None:
        """A line has ended."""
        self._changed.set()
        if line.is_through or self._is_over:
            return
        if not self._have_met and not line.has_heard:  # a start was cancelled before the line was of use
            self._tell_all(Departed(HUB, 0))
            return
        if line is self._above or line.rank in self._beside:
            first = WorkerDied(line.rank, 0, cause=f"its line to rank {self._first} has ended ({why})")
            self.lose(Lost(line.rank, first))
            return
        seat = self._seats[line.rank - self._first]
        last = self.lockstep.last(seat.rank)
        phase, step = ("unknown", None) if last is None else (last.text, last.step)
        cause = f"its line to rank {self._first} has ended ({why})"
        self.lose(Lost(line.rank, WorkerDied(line.rank, seat.pid, phase=phase, step=step, cause=cause)))

    # What ranks say.

    def hear(self, seat: Seat, kind: Kind, call: int, value: Any) -> None:
        """A rank says something.

        Raises:
            MessageNotPortable: It is this process's own rank, and the value cannot travel.
        """
        if self._is_over:
            return
        if kind is _EVENT:
            self._heard[type(value)](seat, value)
        elif self._is_parted:
            return
        elif kind is _MESSAGE and call < 0:
            self._on_keys(seat, value)
        elif kind is _MESSAGE:
            self._on_called(seat, Called._make(value))
        elif kind is _REPLY:
            self._on_reply(seat, call, value)
        elif kind is _FAILURE:
            self._spread_failure(call, value, seat.rank)

    def _on_called(self, seat: Seat, call: Called) -> None:
        try:
            out = self._release.called(seat.rank, call)
        except RanksDiverged as error:
            self.part(error)
            return
        for one in out:
            self._put(one)
        if self._release.has_untold and self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(_TELL_AFTER, self._tell_agreed)
        if self.lockstep.in_doubt:
            if self.lockstep.is_clear:
                self._judge()
            elif self._doubt is None:
                self._doubt = asyncio.get_running_loop().call_later(_DOUBT, self._judge)

    def _on_reply(self, seat: Seat, call: int, value: Any) -> None:
        seq, _ = unpack_call(call)
        try:
            encoded = self._writer.encode(value) if len(self._lines) > isinstance(seat, LineSeat) else None
        except AexecError as error:
            if seat is self._own:
                raise
            self._spread_failure(call, error, HUB)
            return
        reply = (value, encoded)
        out = self._release.replied(seat.rank, seq, reply) if self._check else Forward(seat.rank, seq, reply)
        if out is not None:
            self._put(out)

    def _put(self, out: Agreed | Forward | Departed) -> None:
        if isinstance(out, Forward):
            value, encoded = out.reply
            self._forward(out.rank, _REPLY, pack_call(out.seq, out.rank), value, encoded)
        elif isinstance(out, Agreed):
            for rank in out.ranks:
                self._send_to(self._seats[rank], _EVENT, out.seq, None, None)
        else:
            for seat in self._seats.values():
                if seat.rank != out.rank:
                    seat.tell(out)

    def _tell_agreed(self) -> None:
        """To ranks that no reply of another has told it: their own are not to wait for that."""
        self._telling = None
        for one in self._release.take_untold():
            self._put(one)

    def _judge(self) -> None:
        self._doubt = None
        if not self._is_over and not self._is_parted and self.lockstep.in_doubt:
            self.part(self.lockstep.verdict())

    def _on_cards(self, seat: Seat, message: Cards) -> None:
        whole = self._cards.bring(seat.rank, message.cards[0])
        if whole is not None:
            self._on_replica_cards(Cards(self._first, whole))

    def _on_replica_cards(self, message: Cards) -> None:
        if self._above is not None:
            self._above.tell(message)
            return
        self._all_cards[message.first] = message.cards
        if len(self._all_cards) * self._layout.replica_size == self._layout.size:
            cards = [card for first in sorted(self._all_cards) for card in self._all_cards[first]]
            for line in self._beside.values():
                line.tell(Cards(0, cards))
            self._hand_out(Cards(0, cards))

    def _hand_out(self, cards: Cards) -> None:
        self._have_met = True
        self._tell_all(cards)

    def _on_present(self, seat: Seat, message: Present) -> None:
        seat.pid = message.hello.pid
        whole = self._hellos.bring(seat.rank, message.hello)
        if whole is not None:
            self._tell_all(Assembled(whole))

    def _on_keys(self, seat: Seat, keys: list[str]) -> None:
        number = self._keys.round
        whole = self._keys.bring(seat.rank, keys)
        if whole is not None:
            found = result_of(whole)
            for one in self._seats.values():
                self._send_to(one, _MESSAGE, number, found, None)

    def _on_asked(self, seat: Seat, message: Asked) -> None:
        if message.target == HUB:
            seat.beside(Answered(HUB, message.source, message.call, self._answer_to(message)))
            return
        target = self._seats.get(message.target)
        if target is None or target.is_through:
            doing = f"ask for a {type(message.message).__name__}"
            error = PeerLost(message.source, message.target, doing, "it has closed its executor")
            seat.beside(Answered(message.target, message.source, message.call, error=error))
        else:
            target.beside(message)

    def _on_answered(self, _: Seat, message: Answered) -> None:
        self._seats[message.target].beside(message)

    def _answer_to(self, message: Asked) -> Any:
        assert isinstance(message.message, Whereabouts)
        if self._hellos.round == 1:
            return dict.fromkeys(self._hellos.missing, NOT_READY)
        return {rank: self.lockstep.position(rank) for rank in range(self._layout.replica_size)} if self._check else {}

    def _on_departing(self, seat: Seat, message: Departing) -> None:
        seat.is_through = True
        departed = Departed(seat.rank, message.last, message.why)
        waits = self._check and self._have_met
        now = self._release.departs(departed) if waits else departed
        if now is not None:
            self._put(now)
        if seat is not self._own:
            seat.tell(Farewell())
        self._changed.set()

    # What comes from the hubs of other replicas.

    def _on_other_hub(self, line: PeerLine, message: Any) -> None:
        if isinstance(message, Cards) and line is self._above:
            self._hand_out(message)
        elif isinstance(message, Cards):
            self._on_replica_cards(message)
        elif isinstance(message, Lost):
            self.lose(message)
        elif isinstance(message, (Departing, Farewell)):
            line.is_through = True
            if line is not self._above:
                line.tell(Farewell())
            if not self._have_met:
                self._tell_all(Departed(HUB, 0, message.why))

    # To all.

    def lose(self, lost: Lost) -> None:
        """A rank of any replica has ended: everybody is to hear of it."""
        if lost.rank in self._lost:
            return
        self._lost.add(lost.rank)
        for line in [*self._beside.values(), *([self._above] if self._above else [])]:
            if line.rank != lost.rank and not line.is_through:
                with contextlib.suppress(AexecError):  # it will see the line end
                    line.tell(lost)
        self._tell_all(lost)

    def part(self, error: RanksDiverged) -> None:
        """The ranks of this replica do not do the same: all of them are to hear of it."""
        if not self._is_parted:
            self._is_parted = True
            self._release.clear()
            self._tell_all(Parted(error))

    def _tell_all(self, message: Any) -> None:
        for seat in self._seats.values():
            seat.tell(message)

    def _spread_failure(self, call: int, failure: Any, source: int) -> None:
        """Errors go to whoever made the call, at once; replies to it have to be told as well, in their time."""
        seq, _ = unpack_call(call)
        self._forward(source, _FAILURE, call, failure, self._writer.encode(failure) if self._lines else None)
        agreed = self._release.failed(seq) if self._check else None
        if agreed is not None:
            self._put(agreed)

    def _forward(self, source: int, kind: Kind, call: int, value: Any, encoded: Encoded | None) -> None:
        if source != self._own.rank:
            self._own.send(kind, call, value)
        for seat in self._lines:
            if seat.rank != source:
                self._send_to(seat, kind, call, value, encoded)

    def _send_to(self, seat: Seat, kind: Kind, call: int, value: Any, encoded: Encoded | None) -> None:
        if kind is _REPLY:
            self._release.told(seat.rank, unpack_call(call)[0])
        if isinstance(seat, LocalSeat):
            seat.send(kind, call, value)
        elif isinstance(seat, LineSeat) and not seat.is_through:
            try:
                seat.line.send(kind, call, self._writer.encode(value) if encoded is None else encoded)
            except ChannelFull as full:
                self.part(reads_nothing(seat.rank, unpack_call(call)[0], full.queued))

    # The end.

    async def until_all_are_through(self) -> None:
        """Wait until no other rank of the replica makes calls any more."""
        while any(seat.line.is_open and not seat.is_through for seat in self._lines):
            self._changed = anyio.Event()
            await self._changed.wait()

    def leave(self, departing: Departing) -> None:
        """Say goodbye to whoever is there yet; nothing is heard from now on."""
        for departed in self._release.take_departing():
            self._put(departed)
        self._is_over = True
        for timer in (self._doubt, self._telling):
            if timer is not None:
                timer.cancel()
        for line in [*self._beside.values(), *(seat.line for seat in self._lines)]:
            self._say(line, Farewell(departing.why))
        if self._above is not None:
            self._say(self._above, departing)

    def lines(self) -> Sequence[PeerLine]:
        """All of them."""
        return [*(seat.line for seat in self._lines), *self._beside.values(), *([self._above] if self._above else [])]

    def _say(self, line: PeerLine, message: Any) -> None:
        if not line.is_through:
            line.is_through = True
            with contextlib.suppress(AexecError):
                line.tell(message)
