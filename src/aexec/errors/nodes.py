"""Several nodes, as a follower sees them: it did not get in, or the leader is gone."""

from __future__ import annotations

from aexec.errors.root import AexecError
from aexec.errors.setup import ConfigError

__all__ = ("LeaderLost", "LeaderNotFound", "NodeRefused")


class NodeRefused(ConfigError):
    """The leader does not let this node take part.

    Attributes:
        node_rank: Which node this is.
        leader: Where the leader is.
        why: What it says.
    """

    def __init__(self, node_rank: int, leader: str, why: str) -> None:
        super().__init__(node_rank, leader, why)
        self.node_rank, self.leader, self.why = node_rank, leader, why

    def __str__(self) -> str:
        return f"the leader at {self.leader} refused node {self.node_rank}: {self.why}"


class LeaderNotFound(AexecError, TimeoutError):
    """No leader has answered in time.

    Attributes:
        leader: Where it should have been.
        timeout: The limit, seconds.
        why: What came of trying.
    """

    def __init__(self, leader: str, timeout: float, why: str) -> None:
        super().__init__(leader, timeout, why)
        self.leader, self.timeout, self.why = leader, timeout, why

    def __reduce__(self) -> tuple[type[LeaderNotFound], tuple[str, float, str]]:
        """By its own arguments: of an ``OSError``'s, Python keeps two."""
        return type(self), (self.leader, self.timeout, self.why)

    def __str__(self) -> str:
        return f"no leader has answered at {self.leader} within {self.timeout:g} s (--join-timeout): {self.why}"


class LeaderLost(AexecError):
    """The leader of the nodes is gone, and this node has ended its workers.

    Attributes:
        leader: Where it was.
        why: How that is known.
    """

    def __init__(self, leader: str, why: str) -> None:
        super().__init__(leader, why)
        self.leader, self.why = leader, why

    def __str__(self) -> str:
        return (
            f"the leader at {self.leader} is gone ({self.why}): the workers of this node have ended; "
            "start this command again for the next one"
        )
