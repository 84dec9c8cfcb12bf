"""Why no step is launched: each hold has a reason, and is released by itself. Pure."""

from __future__ import annotations

from aexec.messages.operations import PauseMode

__all__ = ("Holds",)

_MOST = 64  # holds of one reason


class Holds:
    """The holds on one engine, each known by a reason and a key: several may have the same reason."""

    def __init__(self) -> None:
        self._modes: dict[tuple[str, int], PauseMode] = {}  # the latest last

    def __bool__(self) -> bool:
        """True when there is one."""
        return bool(self._modes)

    def __repr__(self) -> str:
        """As in ``<Holds: pause (keep)>``."""
        return f"<Holds: {', '.join(f'{reason} ({mode})' for reason, mode in self._by_reason().items()) or 'none'}>"

    @property
    def reasons(self) -> tuple[str, ...]:
        """Whose they are."""
        return tuple(self._by_reason())

    def add(self, reason: str, mode: PauseMode, key: int = 0) -> None:
        """Hold; of several holds of a reason the mode of the latest counts."""
        self.remove(reason, key)
        self._modes[reason, key] = mode
        same = [hold for hold in self._modes if hold[0] == reason]
        if len(same) > _MOST:  # somebody pauses again and again: only the latest counts
            del self._modes[same[0]]

    def remove(self, reason: str, key: int | None = None) -> None:
        """End a hold, if there is one of this reason and this key; all of the reason without a key."""
        for hold in [hold for hold in self._modes if hold[0] == reason and key in (None, hold[1])]:
            del self._modes[hold]

    def hold_launches(self, *, is_running: bool) -> bool:
        """True when nothing is to be launched: under ``finish`` only once nothing runs any longer.

        Args:
            is_running: A request has begun.
        """
        if not self._modes:
            return False
        return any(mode != "finish" or not is_running for mode in self._by_reason().values())

    def _by_reason(self) -> dict[str, PauseMode]:
        return {reason: mode for (reason, _), mode in self._modes.items()}
