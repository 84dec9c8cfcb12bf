"""Where the ranks of one group find each other: a file without a name.

``torch.distributed`` meets by way of a file that all ranks can open. This one is an anonymous
memory file of the driver, reached through ``/proc``: no port to clash on, nothing on a disk,
nothing to leave behind. Each generation has a fresh one, so that no rank meets a rank of before.
"""

from __future__ import annotations

import os

__all__ = ("Rendezvous",)


class Rendezvous:
    """The meeting place of one generation.

    Args:
        generation: Of the group; for whoever lists the driver's descriptors.
        world_size: Ranks that meet; one alone needs no place.
    """

    def __init__(self, generation: int, world_size: int) -> None:
        self._fd = os.memfd_create(f"aexec-rendezvous-{generation}") if world_size > 1 else -1

    def __repr__(self) -> str:
        return f"<Rendezvous {self.init_method or 'of one'}>"

    @property
    def init_method(self) -> str:
        """For ``torch.distributed.init_process_group``; empty in a world of one."""
        return f"file:///proc/{os.getpid()}/fd/{self._fd}" if self._fd >= 0 else ""

    def close(self) -> None:
        """Nobody can come any longer; those who have met stay connected."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
