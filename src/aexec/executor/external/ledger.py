"""The calls that this rank has made and that have not ended: by their number among the ranks, and by the executor's.

Ranks count calls alike; an executor's own numbers differ from process to process, as it numbers
pings and the like too. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from aexec.messages.step import StepId

__all__ = ("Entry", "Ledger", "Reply")


class Reply(Protocol):
    """Takes an answer."""

    def resolve(self, value: Any, /) -> object:
        """Answer."""
        ...


class Entry(msgspec.Struct, eq=False):
    """One call.

    Attributes:
        seq: Its number among the ranks.
        call: The executor's own.
        missing: Ranks that will answer, and have not.
        launch: Of a sampling: the launch of its step, which nobody answers.
        revoked: Whether this rank's worker has given it back, once it was asked to.
    """

    seq: int
    call: int
    missing: set[int]
    launch: int = 0
    revoked: bool | None = None


class Ledger:
    """The open calls of one rank.

    Attributes:
        last: The number of the last one.
    """

    def __init__(self) -> None:
        self.last = 0
        self._open: dict[int, Entry] = {}
        self._seqs: dict[int, int] = {}
        self._launches: dict[StepId, int] = {}
        self._curious: dict[int, list[Reply]] = {}

    def __repr__(self) -> str:
        return f"<Ledger: {len(self._open)} open, the last is {self.last}>"

    def __len__(self) -> int:
        return len(self._open)

    def made(self, seq: int, call: int, answering: Iterable[int]) -> Entry:
        """A call was made."""
        self.last = seq
        self._seqs[call] = seq
        entry = self._open[seq] = Entry(seq, call, set(answering))
        return entry

    def launched(self, entry: Entry, step: StepId) -> None:
        """It launches a step that is going to be sampled; whoever does that for a second time is answered."""
        self._launches.setdefault(step, entry.seq)

    def samples(self, entry: Entry, step: StepId) -> None:
        """It samples a step: with it ends the launch."""
        entry.launch = self._launches.pop(step, 0)

    def number(self, call: int) -> int:
        """Of a call of the executor among the ranks; 0: it has ended, or was never made."""
        return self._seqs.get(call, 0)

    def entry(self, call: int) -> Entry | None:
        """Of a call of the executor; None: it has ended, or was never made."""
        return self._open.get(self.number(call))

    def answered(self, seq: int, rank: int) -> int:
        """A rank has answered; the executor's number of the call, 0 if it has ended."""
        entry = self._open.get(seq)
        if entry is None:
            return 0
        waited = bool(entry.missing)
        entry.missing.discard(rank)
        if waited and not entry.missing:
            self._end(entry)
        return entry.call

    def given_back(self, call: int, *, never_ran: bool) -> None:
        """This rank's worker was asked to give a call back; whoever wants to know is told."""
        entry = self.entry(call)
        if entry is not None:
            entry.revoked = never_ran
            self._tell(entry.seq, never_ran=never_ran)

    def ask_given_back(self, seq: int, reply: Reply) -> None:
        """Another rank wants to know whether this one's worker has given a call back; it may not even be made here."""
        entry = self._open.get(seq)
        if (entry is None and seq <= self.last) or (entry is not None and entry.revoked is not None):
            reply.resolve(bool(entry and entry.revoked))
        else:
            self._curious.setdefault(seq, []).append(reply)

    def _end(self, entry: Entry) -> None:
        for seq in (entry.seq, entry.launch):
            ended = self._open.pop(seq, None)
            if ended is not None:
                del self._seqs[ended.call]
                self._tell(seq, never_ran=bool(ended.revoked))

    def _tell(self, seq: int, *, never_ran: bool) -> None:
        for reply in self._curious.pop(seq, ()):
            reply.resolve(never_ran)
