"""The environment of workers: what is inherited, what is set, and which device a rank takes. Pure.

One rule for all backends that make processes: a variable is inherited if a pattern of
``ExecutorConfig.env_allow`` or ``env_extra`` matches its name, and none of ``env_deny`` or of the
exclusion file (``AEXEC_ENV_EXCLUDE_FILE``) does; names of :data:`PER_RANK` are never inherited, for
they say which rank *this* process is of some other group, nor are those of :data:`SECRETS`.
``ExecutorConfig.env`` comes on top and wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from aexec import environ
from aexec.config import ExecutorConfig

__all__ = (
    "ESSENTIAL",
    "PER_RANK",
    "SECRETS",
    "device_of",
    "group_environment",
    "inherited",
    "rank_environment",
    "visible_devices",
)

#: Inherited on one machine whatever ``env_allow`` says: without them an interpreter does not come up as here.
ESSENTIAL = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_*", "TZ", "TMPDIR", "PYTHON*", "VIRTUAL_ENV", "CONDA_*",
    "LD_*", "CUDA_*", "NVIDIA_*", "AEXEC_*",
)  # fmt: skip

#: Never inherited: set by torchrun, SLURM and MPI for this process alone.
PER_RANK = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK", "ROLE_*",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_*", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_*",
    "PMI_*", "PMIX_*", "OMPI_COMM_WORLD_*",
)  # fmt: skip

#: Never inherited: what nodes prove to each other is none of the user's code's.
SECRETS = (environ.NODE_KEY.name,)


def inherited(
    here: Mapping[str, str],
    config: ExecutorConfig,
    *,
    default: Sequence[str],
    always: Sequence[str] = (),
    never: Sequence[str] = (),
) -> dict[str, str]:
    """The variables of ``here`` that workers get.

    Args:
        here: The driver's environment.
        config: Its rules.
        default: Patterns that stand for an ``env_allow`` of None.
        always: Patterns that are allowed in any case.
        never: Patterns that are as strong as ``env_deny``.
    """
    allow = (*(default if config.env_allow is None else config.env_allow), *config.env_extra, *always)
    deny = (*PER_RANK, *SECRETS, *config.env_deny, *never)
    return {name: value for name, value in here.items() if _matches(name, allow) and not _matches(name, deny)}


def group_environment(
    here: Mapping[str, str],
    config: ExecutorConfig,
    *,
    ranks: int,
    cpus: int,
    never: Sequence[str] = (),
    network: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """What all workers of a node have in common.

    Args:
        here: The environment of the process that makes them.
        config: Its rules, and ``env``.
        ranks: Workers of this node.
        cpus: CPUs that they may share.
        never: Patterns of the exclusion file.
        network: Which network they take, unless the environment says so; None: all ranks are on
            this node, and stay within it.
    """
    kept = inherited(here, config, default=("*",), always=ESSENTIAL, never=never)
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cpus // ranks)),  # each rank's own pool: together no more than there are CPUs
        "PYTHONUNBUFFERED": "1",  # what a worker prints comes when it prints it
    }
    if network is not None:
        defaults |= network
    elif ranks > 1:
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # one node: no guessing which network is meant
    return {**defaults, **kept, **config.env}


def rank_environment(rank: int, local_rank: int, world_size: int, local_world_size: int) -> dict[str, str]:
    """What tells one rank from the others, as torchrun names it."""
    values = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": local_world_size}
    return {name: str(value) for name, value in values.items()}


def visible_devices(env: Mapping[str, str], installed: Sequence[str]) -> tuple[str, ...]:
    """The CUDA devices that a process with this environment sees, in its order.

    Args:
        env: Its environment; ``CUDA_VISIBLE_DEVICES`` may name numbers, UUIDs or MIG instances.
        installed: The devices of the node.
    """
    text = env.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return tuple(installed)
    seen: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        if not name or name.startswith("-"):
            break  # as CUDA reads it: what follows an invalid entry is not there
        seen.append(name)
    return tuple(seen) if installed else ()


def device_of(local_rank: int, devices: Sequence[str]) -> str:
    """``cuda:<i>`` where each rank has a device of its own, else ``auto``: the worker chooses."""
    return f"cuda:{local_rank}" if local_rank < len(devices) else "auto"


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
