"""A request that has come to this rank, until it has come to all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from aexec.engine.calls import Generate
from aexec.engine.grammar.following import RequestGrammar
from aexec.engine.replicated.agenda import Item
from aexec.engine.replicated.answers import FirstAnswer
from aexec.engine.request import Request
from aexec.engine.stream import TokenStream

__all__ = ("Arrivals", "Coming")


@dataclass(slots=True, eq=False)
class Coming:
    """One of them.

    Attributes:
        message: What was asked.
        samples: What it stands for.
        reply: Whoever asked is told when it is queued, or refused.
        grammars: Of the samples, by id.
        error: Why they have none.
        item: Its place on the agenda; None while its grammars are made.
        stop: Ends that.
        is_left: Nobody wants it any longer.
    """

    message: Generate
    samples: list[Request]
    reply: FirstAnswer[None]
    grammars: dict[str, RequestGrammar] = field(default_factory=dict[str, RequestGrammar])
    error: Exception | None = None
    item: Item | None = None
    stop: Callable[[], None] | None = None
    is_left: bool = False

    @property
    def request_id(self) -> str:
        """Its id."""
        return self.message.request_id


class Arrivals:
    """All of them, by the streams of their readers."""

    def __init__(self) -> None:
        self._by_stream: dict[TokenStream, Coming] = {}

    def __len__(self) -> int:
        """Samples that are coming."""
        return len(self._by_stream)

    def __repr__(self) -> str:
        """As in ``<Arrivals: 3 samples are coming>``."""
        return f"<Arrivals: {len(self)} samples are coming>"

    def add(self, coming: Coming) -> None:
        """One more."""
        self._by_stream.update(dict.fromkeys(coming.message.streams, coming))

    def find(self, stream: TokenStream) -> Coming | None:
        """The request whose tokens will go to ``stream``."""
        return self._by_stream.get(stream)

    def remove(self, coming: Coming) -> None:
        """It has come, or never will."""
        for stream in coming.message.streams:
            self._by_stream.pop(stream, None)

    def clear(self) -> list[Coming]:
        """Nothing comes any longer; returns what would have."""
        there = list(dict.fromkeys(self._by_stream.values()))
        self._by_stream.clear()
        return there
