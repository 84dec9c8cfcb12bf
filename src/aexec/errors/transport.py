"""Two ends of a channel: it is closed, it is full, or a value does not fit into shared memory."""

from __future__ import annotations

from aexec.errors.root import AexecError

__all__ = (
    "ArenaFull",
    "ChannelClosed",
    "ChannelFull",
    "LinkRefused",
    "MeetingFailed",
    "MessageNotDecoded",
    "MessageTooLarge",
    "TransportError",
)


class TransportError(AexecError):
    """Something did not get from one process to another."""


class ChannelClosed(TransportError, ConnectionError):
    """Nothing goes through this channel any longer.

    Attributes:
        channel: Its name.
        reason: Why, in words.
        orderly: True: one of the two ends closed it on purpose. False: the peer is gone,
            or it sent what is no frame.
    """

    def __init__(self, channel: str, reason: str, orderly: bool = False) -> None:  # noqa: FBT002 - see errors/* in pyproject
        super().__init__(channel, reason, orderly)
        self.channel, self.reason, self.orderly = channel, reason, orderly

    def __str__(self) -> str:
        return f"channel {self.channel} is closed: {self.reason}"


class ChannelFull(TransportError):
    """The peer does not read, and as many frames wait for it as may wait.

    Attributes:
        channel: Its name.
        queued: Frames that wait.
        num_bytes: How long they are.
    """

    def __init__(self, channel: str, queued: int, num_bytes: int = 0) -> None:
        super().__init__(channel, queued, num_bytes)
        self.channel, self.queued, self.num_bytes = channel, queued, num_bytes

    def __str__(self) -> str:
        size = f" ({self.num_bytes / 2**20:,.1f} MiB)" if self.num_bytes >= 1 << 20 else ""
        return (
            f"channel {self.channel} is full: {self.queued} frames{size} wait for a peer that does not read them; "
            "await flushed() before sending more, or find out why it is stuck"
        )


class ArenaFull(TransportError, MemoryError):
    """A value does not fit into the shared memory that bulk data travels through.

    Attributes:
        need: Bytes that the value takes.
        free: Bytes that are free under the limit, or that the system would still give.
        limit: The limit in bytes.
        setting: Name of the setting that bounds it; empty: there is none.
        reason: What is in the way, in words.
    """

    def __init__(self, need: int, free: int, limit: int, setting: str, reason: str) -> None:
        super().__init__(need, free, limit, setting, reason)
        self.need, self.free, self.limit, self.setting, self.reason = need, free, limit, setting, reason

    def __str__(self) -> str:
        need, free, limit = (f"{size / 2**20:,.1f} MiB" for size in (self.need, self.free, self.limit))
        setting = f" ({self.setting})" if self.setting else ""
        return f"a message needs {need} of shared memory and {free} of {limit} are free{setting}: {self.reason}"


class MessageNotDecoded(TransportError):
    """A frame came whole, and its value cannot be made here.

    Attributes:
        channel: What it came through.
        what: What it is, as in ``MESSAGE of call 17``.
        why: What the decoder says.
    """

    def __init__(self, channel: str, what: str, why: str) -> None:
        super().__init__(channel, what, why)
        self.channel, self.what, self.why = channel, what, why

    def __str__(self) -> str:
        return (
            f"channel {self.channel}: a {self.what} cannot be decoded here ({self.why}); "
            "whatever it is made of has to be importable at both ends"
        )


class MeetingFailed(TransportError, ConnectionError):
    """A worker that somebody else has started did not get to its driver.

    Attributes:
        rank: Its rank.
        line: Which of its lines it wanted.
        where: The addresses that it tried.
        why: What came of it, by address.
    """

    def __init__(self, rank: int, line: str, where: str, why: str) -> None:
        super().__init__(rank, line, where, why)
        self.rank, self.line, self.where, self.why = rank, line, where, why

    def __reduce__(self) -> tuple[type[MeetingFailed], tuple[int, str, str, str]]:
        """By its own arguments: of an ``OSError``'s, Python keeps two."""
        return type(self), (self.rank, self.line, self.where, self.why)

    def __str__(self) -> str:
        return f"rank {self.rank} could not get its {self.line} line to the driver at {self.where}: {self.why}"


class LinkRefused(TransportError, ValueError):
    """Whoever listens there does not take a line from this node, and will not if it is asked again.

    Attributes:
        where: The address that was dialled.
        why: What is known of the reason, and what to change.
    """

    def __init__(self, where: str, why: str) -> None:
        super().__init__(where, why)
        self.where, self.why = where, why

    def __str__(self) -> str:
        return f"{self.where} refused this node: {self.why}"


class MessageTooLarge(TransportError, ValueError):
    """A message does not fit into a buffer whose size is fixed; it was not sent.

    Attributes:
        what: What it is, as in ``the hidden states of step 7``.
        need: Bytes that it takes.
        limit: Bytes that there are.
        setting: Name of the setting that says how many.
    """

    def __init__(self, what: str, need: int, limit: int, setting: str) -> None:
        super().__init__(what, need, limit, setting)
        self.what, self.need, self.limit, self.setting = what, need, limit, setting

    def __str__(self) -> str:
        return (
            f"{self.what}: {self.need:,} bytes, and a message may have {self.limit:,}; raise {self.setting}, or make "
            "steps smaller"
        )
