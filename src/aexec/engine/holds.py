"""Why no step is launched: each hold has a reason, and is released by itself. Pure."""

from __future__ import annotations

from aexec.messages.operations import PauseMode

__all__ = ("Holds",)


class Holds:
    """The holds on one engine."""

    def __init__(self) -> None:
        self._modes: dict[str, PauseMode] = {}  # by reason

    def __bool__(self) -> bool:
        """True when there is one."""
        return bool(self._modes)

    def __repr__(self) -> str:
        """As in ``<Holds: pause (keep)>``."""
        return f"<Holds: {', '.join(f'{reason} ({mode})' for reason, mode in self._modes.items()) or 'none'}>"

    @property
    def reasons(self) -> tuple[str, ...]:
        """Whose they are."""
        return tuple(self._modes)

    def add(self, reason: str, mode: PauseMode) -> None:
        """Hold; the same reason again changes the mode."""
        self._modes[reason] = mode

    def remove(self, reason: str) -> None:
        """End a hold, if there is one of this reason."""
        self._modes.pop(reason, None)

    def hold_launches(self, *, is_running: bool) -> bool:
        """True when nothing is to be launched: under ``finish`` only once nothing runs any longer.

        Args:
            is_running: A request has begun.
        """
        return any(mode != "finish" or not is_running for mode in self._modes.values())
