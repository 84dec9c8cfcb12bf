"""Which request brings the workers down. Pure.

Whatever was in a lost step may have caused the crash. Each such request gets a strike, and
loses all of them with its next token: whoever gets on is innocent. A request with
:data:`STRIKES` of them is a suspect: it runs alone until its next token. If the workers go
down while it does, it is condemned: it has been running in :data:`STRIKES` + 1 crashes in a
row, the last time alone. So a request that kills its workers each time costs three restarts,
not the budget of all, and one that was merely there costs a step of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ("STRIKES", "Suspects")

#: Crashes in a row after which a request runs alone.
STRIKES = 2


class Suspects:
    """Strikes by request."""

    def __init__(self) -> None:
        self._strikes: dict[str, int] = {}
        self.num_condemned = 0

    def __repr__(self) -> str:
        """As in ``<Suspects: 3 with a strike, a runs alone>``."""
        alone = self.alone
        return f"<Suspects: {len(self._strikes)} with a strike{f', {alone} runs alone' if alone else ''}>"

    def __bool__(self) -> bool:
        """True when anybody has a strike."""
        return bool(self._strikes)

    def __len__(self) -> int:
        """Requests that have to run alone."""
        return sum(strikes >= STRIKES for strikes in self._strikes.values())

    @property
    def alone(self) -> str | None:
        """The request that has to run alone now; None: all may run."""
        return next((request_id for request_id, strikes in self._strikes.items() if strikes >= STRIKES), None)

    def accuse(self, steps: Sequence[Collection[str]]) -> str | None:
        """The workers went down.

        Args:
            steps: The requests of each lost step.

        Returns:
            The request that did it, if that is certain enough; it has no strikes any longer.
        """
        present = {request_id: None for step in steps for request_id in step}  # in order
        guilty = self.alone
        if guilty is not None and list(present) == [guilty]:
            self.clear(guilty)
            self.num_condemned += 1
            return guilty
        for request_id in present:
            self._strikes[request_id] = self._strikes.get(request_id, 0) + 1
        return None

    def keep(self, request_ids: Collection[str]) -> None:
        """Only these are left of all requests."""
        self._strikes = {name: strikes for name, strikes in self._strikes.items() if name in request_ids}

    def clear(self, request_id: str) -> None:
        """It has a new token, or has ended."""
        self._strikes.pop(request_id, None)
