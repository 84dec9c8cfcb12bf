"""What the driver needs of whoever keeps the grammars of requests."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from aexec.engine.grammar.following import RequestGrammar
from aexec.engine.grammar.statistics import GrammarStatistics
from aexec.engine.records import RequestUpdate
from aexec.engine.request import Request
from aexec.errors import AexecError, InvalidRequest, ProtocolError
from aexec.messages.batch import GrammarOutput
from aexec.messages.structured import StructuredOutput

__all__ = ("Masks", "NoMasks", "StepMasks")


class Masks(NamedTuple):
    """The bitmask of a step.

    Attributes:
        output: The rows.
        failed: Requests that cannot go on, and why; they have no row, or one that allows everything. Not by id: each
            may have ended meanwhile, and its id be another's.
    """

    output: GrammarOutput
    failed: Mapping[Request, AexecError]


class StepMasks(Protocol):
    """Compiles the grammars of requests, and makes the bitmask of a step for those that have one."""

    def statistics(self) -> GrammarStatistics:
        """Grammars in numbers."""
        ...

    def check(self, structured: StructuredOutput) -> None:
        """Refuse what is certain not to compile, before its request is queued.

        Raises:
            AexecError: It cannot be had.
        """
        ...

    async def compile(self, request: Request) -> RequestGrammar:
        """The grammar of a request; cancelled if it ends before. Raises: it does not compile."""
        ...

    def constrained(self, sampled: Iterable[Request]) -> frozenset[str]:
        """Those of the requests that a step samples which have a grammar; asked at each launch."""
        ...

    def mask(self, request_ids: frozenset[str]) -> Coroutine[Any, Any, Masks]:
        """The bitmask of these, as they are now; asked once all tokens before are told. Raises: the step cannot be sampled."""
        ...

    def accept(self, updates: Iterable[RequestUpdate]) -> list[RequestUpdate]:
        """Learn the tokens that a step brought, before the next bitmask is asked for; may end their requests."""
        ...


class NoMasks:
    """For engines without grammars."""

    def statistics(self) -> GrammarStatistics:
        """Nothing."""
        return GrammarStatistics()

    def check(self, structured: StructuredOutput) -> None:
        """There are none.

        Raises:
            InvalidRequest: Always.
        """
        raise InvalidRequest(f"this engine keeps no grammars: expected a request without {structured.kind}")

    async def compile(self, request: Request) -> RequestGrammar:
        """Nobody gets so far, as :meth:`check` refuses.

        Raises:
            ProtocolError: Always.
        """
        raise ProtocolError(f"{request!r} has a grammar, and this engine keeps none: it was to be refused by check()")

    def constrained(self, sampled: Iterable[Request]) -> frozenset[str]:  # noqa: ARG002
        """None."""
        return frozenset()

    async def mask(self, request_ids: frozenset[str]) -> Masks:
        """Nobody gets so far, as none is constrained.

        Raises:
            ProtocolError: Always.
        """
        raise ProtocolError(f"a bitmask was asked for {sorted(request_ids)}, and this engine keeps no grammars")

    def accept(self, updates: Iterable[RequestUpdate]) -> list[RequestUpdate]:
        """There is nothing to learn."""
        return list(updates)
