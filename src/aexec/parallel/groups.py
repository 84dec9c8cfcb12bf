"""``torch.distributed`` for the ranks of one executor: who may talk to whom, and how long one waits.

One world, and within it a group for each set of ranks that a layout names: of one executor, or
of all replicas that a launcher has started. On a CPU they speak gloo; on CUDA nccl for tensors
there, and gloo beside it for tensors on the host. The tensors that go from stage to stage have
groups of their own, so that they never come between the collectives of tensor parallelism.

A trainer in the same process may have made the world already. Then the groups are made within
that one, with backends and time limits of their own, and it is left open at the end.

On CUDA none of this has been run yet.
"""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as _distributed

from aexec import environ
from aexec.errors import ConfigError, PeerLost
from aexec.parallel.layout import RankGroups, RankLayout
from aexec.parallel.rendezvous import tcp_address

__all__ = ("Groups", "OwnWorld", "first_line", "open_groups")

distributed: Any = _distributed  # its annotations are partial
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class OwnWorld:
    """A world that is made here, by the arguments of ``init_process_group``; with it goes what torch does to the process."""

    def __init__(self, **arguments: Any) -> None:
        self._hook = sys.excepthook
        distributed.init_process_group(**arguments)
        self._hook_of_torch = sys.excepthook  # it puts the rank before each line, and torch leaves it there

    def close(self) -> None:
        """Give it up."""
        distributed.destroy_process_group()
        if sys.excepthook is self._hook_of_torch:
            sys.excepthook = self._hook


class Groups:
    """The groups of one rank.

    Args:
        layout: Who they are.
        rank: This rank.
        timeout: Seconds that one rank waits for another.
        backend: What they speak, as in ``gloo``.
        own_world: It is given up with them; None: it is somebody else's.

    Attributes:
        layout: As given.
        rank: As given: a rank of the world, whose numbers torch wants to hear.
        timeout: As given.
        tensor: The process group of the ranks that share its layers; None if it is alone.
        pipeline: That of the ranks at its place in all stages; None for a single stage.
    """

    def __init__(
        self, layout: RankLayout, rank: int, timeout: float, *, backend: str, own_world: OwnWorld | None
    ) -> None:
        self.layout, self.rank, self.timeout = layout, rank, timeout
        self._backend, self._own_world = backend, own_world
        self._world: Any = distributed.group.WORLD  # after it is given up there may be another one
        self.tensor: Any = None
        self.pipeline: Any = None
        try:
            self.tensor = self._join(layout.tensor_groups)
            self.pipeline = self._join(layout.pipeline_groups)
        except BaseException:
            self.close()  # else whoever opens the next ones would take the world for another's
            raise

    def __repr__(self) -> str:
        within = " in a world that was there" if self._own_world is None else ""
        return f"<Groups of rank {self.rank} in {self.layout}: {f'open{within}' if self._is_open else 'closed'}>"

    def close(self) -> None:
        """Leave all groups; peers that are still in one see a closed connection."""
        left = [group for group in (self.tensor, self.pipeline) if group is not None]
        is_open, self._world, self.tensor, self.pipeline = self._is_open, None, None, None
        if is_open and self._own_world is not None:
            self._own_world.close()
        elif is_open:
            for group in left:
                distributed.destroy_process_group(group)

    @property
    def _is_open(self) -> bool:
        return self._world is not None and distributed.group.WORLD is self._world

    def _join(self, groups: RankGroups) -> Any:
        """The group that this rank is in; all ranks make all of them, in the same order."""
        limit = dt.timedelta(seconds=self.timeout)
        own: Any = None
        for ranks in groups:
            if len(ranks) > 1:
                group = distributed.new_group(list(ranks), timeout=limit, backend=self._backend)
                own = group if self.rank in ranks else own
        return own


def open_groups(layout: RankLayout, rank: int, *, init_method: str, device: str, timeout: float) -> Groups:
    """Meet all other ranks; every rank calls it, and it blocks until they all have.

    A world that the launcher or a trainer has made already is used as it is, and left open at the end.

    Args:
        layout: Of one executor, or of all replicas that meet there.
        rank: This rank, counted through all of them.
        init_method: Where they meet; see ``WorkerContext.distributed_init_method``.
        device: As in ``cpu`` or ``cuda:0``: where this rank's tensors are.
        timeout: Seconds that one rank waits for another, here and in every collective.

    Raises:
        ConfigError: There is no place to meet, or no backend for the device.
        PeerLost: Not all have come in time.
    """
    backend = _backend(device)
    is_given = distributed.is_initialized()
    if is_given:
        _check_world(layout, rank)
    elif not init_method:
        raise ConfigError(
            f"{layout.size} ranks have to meet, and the backend has set no WorkerContext.distributed_init_method: "
            "expected file:///path or tcp://host:port"
        )
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    with _named_errors(rank % layout.replica_size, layout.size):
        own_world = None
        if not is_given:
            limit = dt.timedelta(seconds=timeout)
            meeting = _meeting(init_method, rank, layout.size, limit)
            own_world = OwnWorld(backend=backend, rank=rank, world_size=layout.size, timeout=limit, **meeting)
        return Groups(layout, rank, timeout, backend=backend, own_world=own_world)


def first_line(error: BaseException) -> str:
    """What an error of torch says before it begins to guess."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    line = line.partition("] ")[2] or line
    return line.partition(". ")[0]


def _meeting(init_method: str, rank: int, size: int, limit: dt.timedelta) -> dict[str, Any]:
    """Where to meet, as ``init_process_group`` takes it.

    Under torchrun torch takes any ``tcp://`` for the address of torchrun's own store, so that nobody
    would listen there: the store is made here.
    """
    address = tcp_address(init_method)
    if address is None:
        return {"init_method": init_method}
    uses_libuv = environ.inherited().get("USE_LIBUV", "1") == "1"  # as torch reads it
    store = distributed.TCPStore(*address, size, rank == 0, limit, multi_tenant=True, use_libuv=uses_libuv)
    return {"store": store}


def _backend(device: str) -> str:
    kind = device.partition(":")[0]
    if kind not in _BACKENDS:
        raise ConfigError(f"device is {device!r}: expected cpu or cuda for a model on several ranks")
    if kind == "cuda" and not distributed.is_nccl_available():
        raise ConfigError(f"device is {device!r}, and this torch has no nccl: take device='cpu', or another torch")
    return _BACKENDS[kind]


def _check_world(layout: RankLayout, rank: int) -> None:
    size, own = distributed.get_world_size(), distributed.get_rank()
    if (size, own) != (layout.size, rank):
        raise ConfigError(
            f"torch.distributed is initialised in this process as rank {own} of {size}: expected rank {rank} of "
            f"{layout.size}; leave it to the executor, or let the layout agree"
        )


@contextmanager
def _named_errors(rank: int, size: int) -> Generator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's own kinds are subclasses
        raise PeerLost(rank, None, f"meet the other ranks of {size}", first_line(error)) from error
