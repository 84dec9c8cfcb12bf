"""How one pipeline stage hands its hidden states to the next, whatever carries them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

__all__ = ("LinkStatistics", "StageLink")


class LinkStatistics(NamedTuple):
    """Figures of one rank's links to the stages beside it.

    Attributes:
        received: Hidden states that came in.
        sent: Hidden states that went out.
        in_flight: Of those, how many are not known to have arrived.
        wait_seconds: Seconds that this rank stood still for the stage before: its bubble.
    """

    received: int
    sent: int
    in_flight: int
    wait_seconds: float


class StageLink(Protocol):
    """The links of one rank to the stages before and after its own; used by one thread.

    Hidden states arrive in the order of steps, and what is received for a step is what
    was sent for it.
    """

    def open(self) -> None:
        """Meet the stages beside, if that is not done yet.

        Raises:
            PeerLost: One of them is not there.
        """
        ...

    def receive(self, step: int, into: Any, /) -> Any:
        """Wait for the hidden states of a step.

        Args:
            step: Its id.
            into: What has their shape, and may be overwritten.

        Raises:
            PeerLost: The stage before is gone or too late, or failed at this step.
            ProtocolError: It is at another step.
        """
        ...

    def send(self, step: int, hidden: Any, /) -> None:
        """Hand hidden states on, and keep them until they have arrived; does not wait for that.

        Raises:
            PeerLost: The stage after is gone, or does not take what was sent long ago.
        """
        ...

    def send_failure(self, step: int, blank: Any, /) -> None:
        """Tell the stage after that there will be nothing for this step; ``blank`` has the shape."""
        ...

    def close(self) -> None:
        """Let go of everything; nothing is waited for."""
        ...

    def statistics(self) -> LinkStatistics:
        """The figures so far."""
        ...
