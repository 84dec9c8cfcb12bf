"""Who waits for the end of an actor, and whose end it waits for."""

from __future__ import annotations

from collections.abc import Callable

from aexec.actor.core import Core
from aexec.actor.lifecycle import OVER, Exit
from aexec.actor.runtime import Promise
from aexec.actor.supervision import Supervision
from aexec.actor.ward import Ward

__all__ = ("Observed",)


class Observed(Ward):
    """One actor and its death-watch; ``cell.Cell`` adds its beginning and its end."""

    __slots__ = ("_observers", "_waiting", "_watching")

    def __init__(self, core: Core, name: str, bound: int, parent: Ward | None, supervision: Supervision | None) -> None:
        super().__init__(core, name, bound, parent, supervision)
        self._observers: dict[Observed, Callable[[Exit], object]] | None = None
        self._watching: set[Observed] | None = None
        self._waiting: list[Promise[Exit]] | None = None

    async def closed(self) -> Exit:
        """Wait until it is over."""
        while self.state not in OVER:
            promise = self.core.runtime.promise()
            self._waiting = waiting = self._waiting or []
            waiting.append(promise)
            try:
                await promise
            except BaseException:
                waiting.remove(promise)
                raise
        assert self.exit is not None
        return self.exit

    def observe(self, other: Observed, tell: Callable[[Exit], object]) -> None:
        """Have ``tell`` called when another actor is over; at once if it is."""
        if other.state in OVER:
            assert other.exit is not None
            tell(other.exit)
            return
        if other._observers is None:
            other._observers = {}
        if self._watching is None:
            self._watching = set()
        other._observers[self] = tell
        self._watching.add(other)

    def forget(self, other: Observed) -> None:
        """Be told no longer."""
        if self._watching is not None:
            self._watching.discard(other)
        if other._observers is not None:
            other._observers.pop(self, None)

    def forget_all(self) -> None:
        """Be told of nobody any longer."""
        for other in list(self._watching or ()):
            self.forget(other)

    def tell_of_end(self, exit_: Exit) -> None:
        """Tell all who wait for its end."""
        waiting, self._waiting = self._waiting or (), None
        for promise in waiting:
            if not promise.done():
                promise.set_result(exit_)
        for observer, tell in list((self._observers or {}).items()):
            observer.forget(self)
            tell(exit_)
