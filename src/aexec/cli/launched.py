"""One command in many processes: what rank 0 says for all of them, and what another rank has to say itself.

Under torchrun or srun each rank runs the whole command. All have the same answers and most
errors in common, so rank 0 shows them. Another rank speaks when it may be the only one who
knows what has happened to it, or when rank 0 cannot any longer.
"""

from __future__ import annotations

from typing import NamedTuple

from cyclopts import CycloptsError

from aexec import environ
from aexec.cli.failures import explain, root_of
from aexec.cli.options import EngineOptions
from aexec.errors import ConfigError, InvalidRequest, RanksDiverged, RemoteError, RequestError, WorkerDied
from aexec.executor.external.launcher import read_launch

__all__ = ("Place", "place_of")

_SAME_EVERYWHERE = (CycloptsError, InvalidRequest)
_KNOWN_TO_A_REPLICA = (RequestError, RanksDiverged, RemoteError, WorkerDied)


class Place(NamedTuple):
    """Which of the processes this is that run the same command.

    Attributes:
        rank: Counted over all of them.
        rank_in_replica: Counted over those that hold one model together.
    """

    rank: int = 0
    rank_in_replica: int = 0

    @property
    def is_quiet(self) -> bool:
        """Another process shows progress and answers."""
        return self.rank > 0

    def complain(self, error: BaseException) -> None:
        """Print what went wrong here, unless another rank is sure to print the same; not for rank 0, which prints all."""
        error = root_of(error)
        if isinstance(error, _SAME_EVERYWHERE):
            return
        is_its_own = getattr(error, "rank", None) in (0, self.rank_in_replica)  # 0: which may not be able to
        if self.rank_in_replica == 0 or is_its_own or not isinstance(error, _KNOWN_TO_A_REPLICA):
            explain(error, f"rank {self.rank}: ")


def place_of(options: EngineOptions) -> Place:
    """What a launcher has told this process; with executors that need none, the only one."""
    if options.executor != "external_launcher":
        return Place()
    try:
        rank = read_launch(environ.inherited()).rank
    except ConfigError:
        return Place()  # opening the executor says what is missing
    return Place(rank, rank % max(options.tensor_parallel_size * options.pipeline_parallel_size, 1))
