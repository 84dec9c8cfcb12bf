"""What torchrun or SLURM has told this process: which rank it is, of how many, and where they meet. Pure.

torchrun's names count; what it has not set is taken from SLURM's, if ``srun`` started this
process. A trainer that has initialised ``torch.distributed`` by itself needs no variables: its
world says who this is.

Source: torch 2.13, ``distributed/run.py`` and ``elastic/agent/server/local_elastic_agent.py``;
SLURM 24.05, ``srun(1)``, "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aexec.config import ParallelConfig
from aexec.errors import ConfigError
from aexec.parallel.layout import RankLayout

__all__ = ("Launched", "World", "device_of_rank", "first_host", "layout_of", "read_launch")

_REQUIRED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FROM_SLURM = {
    "RANK": "SLURM_PROCID",
    "LOCAL_RANK": "SLURM_LOCALID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "GROUP_RANK": "SLURM_NODEID",
}
_MOST = 1 << 20  # ranks; more is a slip of the pen
_FIRST_PORT, _PORTS = 10_000, 20_000  # below the range of ports that the kernel gives away


class World(NamedTuple):
    """The ``torch.distributed`` world that a trainer has initialised.

    Attributes:
        rank: This process.
        size: All of them.
    """

    rank: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """This process among those that were started.

    Attributes:
        launcher: ``torchrun``, ``srun`` or ``torch.distributed``, for people.
        rank: Counted over all replicas.
        world_size: All processes.
        local_rank: Counted on this node.
        local_world_size: Processes on this node; all of them if nobody has said.
        node_rank: This node.
        knows_node: Somebody has said how many processes are on this node.
        master_addr: Where they meet; may be empty if the trainer's world is where.
        master_port: Likewise; 0.
        has_store: The launcher keeps a store there; else rank 0 has to make one.
        attempt: How often the launcher has restarted them.
        is_initialised: The trainer has initialised ``torch.distributed``: it is shared, and left as it is.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int = 0
    knows_node: bool = True
    master_addr: str = ""
    master_port: int = 0
    has_store: bool = False
    attempt: int = 0
    is_initialised: bool = False

    @property
    def is_one_node(self) -> bool:
        """All ranks are on this node, for certain."""
        return self.knows_node and self.local_world_size == self.world_size

    def __str__(self) -> str:
        """As in ``rank 1 of 8 (local rank 1 of 4 on node 0, started by torchrun)``."""
        local = f"local rank {self.local_rank} of {self.local_world_size} on node {self.node_rank}"
        return f"rank {self.rank} of {self.world_size} ({local}, started by {self.launcher})"


def read_launch(here: Mapping[str, str], world: World | None = None) -> Launched:
    """Which rank this process is.

    Args:
        here: Its environment.
        world: The trainer's, if it has initialised one.

    Raises:
        ConfigError: Nobody has said, or not all of it: names all that is missing, and how to start. Or what was
            said cannot be.
    """
    if world is not None and not any(here.get(name) for name in ("RANK", "SLURM_PROCID")):
        return _of_world(here, world)
    told, is_slurm = _told(here)
    missing = [name for name in _REQUIRED if not told.get(name)]
    if world is not None:
        missing = [name for name in missing if not name.startswith("MASTER_")]
    if missing:
        raise ConfigError(_how_to_start(missing, here))
    size = _number(told, "WORLD_SIZE", 1, _MOST)
    found = Launched(
        launcher="srun" if is_slurm else "torchrun",
        rank=_number(told, "RANK", 0, size - 1),
        world_size=size,
        local_rank=_number(told, "LOCAL_RANK", 0, _local_size(told, size) - 1),
        local_world_size=_local_size(told, size),
        node_rank=_number(told, "GROUP_RANK", 0, _MOST, 0),
        knows_node=_knows_node(told, size),
        master_addr=told.get("MASTER_ADDR", ""),
        master_port=_number(told, "MASTER_PORT", 1, 65535, 0),
        has_store=here.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(told, "TORCHELASTIC_RESTART_COUNT", 0, _MOST, 0),
        is_initialised=world is not None,
    )
    if world is not None and world != (found.rank, found.world_size):
        raise ConfigError(
            f"torch.distributed is initialised in this process as rank {world.rank} of {world.size}, and its "
            f"environment says {found}: let the two agree"
        )
    return found


def layout_of(launched: Launched, parallel: ParallelConfig) -> RankLayout:
    """The layout of all ranks: as many replicas as there are ranks for (G53).

    Raises:
        ConfigError: They do not divide, or another number of replicas is asked for: gives the numbers.
    """
    size, replica = launched.world_size, parallel.world_size
    sizes = f"tensor_parallel_size={parallel.tensor_parallel_size} x pipeline_parallel_size="
    sizes += f"{parallel.pipeline_parallel_size}"
    if size % replica:
        raise ConfigError(
            f"{launched.launcher} has started {size} rank{'s' * (size > 1)}, and {sizes} takes {replica} for each "
            f"replica: start {replica}, or a multiple of it, or choose sizes whose product divides {size}"
        )
    replicas = size // replica
    if parallel.data_parallel_size not in (1, replicas):
        raise ConfigError(
            f"data_parallel_size is {parallel.data_parallel_size}, and the {size} ranks that {launched.launcher} has "
            f"started are {replicas} replica{'s' * (replicas > 1)} of {sizes}: leave it out, for the number of ranks "
            f"decides, or start {parallel.data_parallel_size * replica}"
        )
    return RankLayout(parallel.tensor_parallel_size, parallel.pipeline_parallel_size, replicas)


def device_of_rank(launched: Launched, devices: Sequence[str]) -> str:
    """The device of this rank, of those that this process sees; ``auto`` if it sees none (G40).

    The launcher, or the user, decides what a process sees, and that is left as it is: a process
    that sees one device takes that one, one that sees many takes the one at its local rank.

    Raises:
        ConfigError: It sees several, and none for its local rank.
    """
    if not devices:
        return "auto"
    if len(devices) == 1:
        return "cuda:0"
    if launched.local_rank >= len(devices):
        raise ConfigError(
            f"this is {launched}, and it sees {len(devices)} devices ({', '.join(devices)}): start no more ranks on a "
            "node than it has devices, or let each see one by CUDA_VISIBLE_DEVICES"
        )
    return f"cuda:{launched.local_rank}"


def first_host(nodes: str) -> str:
    """The first of a list of hosts as SLURM writes it.

    >>> first_host("node[03-07,11],gpu1"), first_host("login"), first_host("r[1-2]n[01-16]")
    ('node03', 'login', 'r1n01')
    """
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""


def _told(here: Mapping[str, str]) -> tuple[dict[str, str], bool]:
    """The variables by torchrun's names; and whether SLURM has said who this is."""
    told = {name: value for name, value in here.items() if value}
    if told.get("RANK") or not told.get("SLURM_PROCID"):
        return told, False
    for name, slurms in _FROM_SLURM.items():
        if slurms in told:
            told.setdefault(name, told[slurms])
    told.setdefault("WORLD_SIZE", told.get("SLURM_NPROCS", ""))
    nodes = told.get("SLURM_STEP_NODELIST") or told.get("SLURM_JOB_NODELIST") or told.get("SLURM_NODELIST") or ""
    told.setdefault("MASTER_ADDR", first_host(nodes))
    told.setdefault("LOCAL_WORLD_SIZE", _tasks_here(told))
    job = told.get("SLURM_JOB_ID") or told.get("SLURM_JOBID") or ""
    if job.isdecimal():
        step = told.get("SLURM_STEP_ID", "0")
        offset = int(job) * 31 + (int(step) if step.isdecimal() else 0)
        told.setdefault("MASTER_PORT", str(_FIRST_PORT + offset % _PORTS))
    return told, True


def _tasks_here(told: Mapping[str, str]) -> str:
    """Tasks of this node, from a text such as ``4(x2),3``: four on each of two nodes, three on the next."""
    text = told.get("SLURM_STEP_TASKS_PER_NODE") or told.get("SLURM_TASKS_PER_NODE") or ""
    counts: list[str] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [count] * min(int(times or 1), _MOST)
    node = told.get("SLURM_NODEID", "0")
    here = int(node) if node.isdecimal() else 0
    return counts[here] if here < len(counts) else ""


def _local_size(told: Mapping[str, str], size: int) -> int:
    return _number(told, "LOCAL_WORLD_SIZE", 1, size, size)


def _knows_node(told: Mapping[str, str], size: int) -> bool:
    return size == 1 or bool(told.get("LOCAL_WORLD_SIZE"))


def _number(told: Mapping[str, str], name: str, least: int, most: int, default: int | None = None) -> int:
    text = told.get(name, "")
    if not text and default is not None:
        return default
    if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
        slurms = _FROM_SLURM.get(name, "")
        whose = f" (from {slurms})" if slurms and told.get(slurms) == text else ""
        raise ConfigError(f"{name} is {text!r}{whose}: expected a number from {least} to {most}")
    return int(text)


def _of_world(here: Mapping[str, str], world: World) -> Launched:
    told = {name: value for name, value in here.items() if value}
    return Launched(
        launcher="torch.distributed",
        rank=world.rank,
        world_size=world.size,
        local_rank=_number(told, "LOCAL_RANK", 0, world.size - 1, world.rank),
        local_world_size=_local_size(told, world.size),
        knows_node=_knows_node(told, world.size),
        master_addr=told.get("MASTER_ADDR", ""),
        is_initialised=True,
    )


def _how_to_start(missing: Sequence[str], here: Mapping[str, str]) -> str:
    there = [name for name in _REQUIRED if name not in missing and here.get(name)]
    found = f"{', '.join(there)} {'is' if len(there) == 1 else 'are'} set, and " if there else ""
    verb = "is" if len(missing) == 1 else "are"
    return (
        "backend 'external_launcher' makes no processes: a launcher starts one for each rank, and tells it which it is. "
        f"{found}{', '.join(missing)} {verb} not set here. Start the script with 'torchrun --nproc-per-node 2 script.py', "
        "or under SLURM with 'srun --ntasks 2 python script.py'; or take backend='mp', which makes its ranks itself"
    )
