"""The environment of workers that Ray made: what is sent to them, and what becomes of it there. Pure.

The rule is that of all backends (``aexec.executor.lines.environment``), with another default:
nodes of a cluster have environments of their own, so only what libraries of the trade read is
sent (:data:`COPIED`), and what a node says itself is kept, unless ``env_precedence`` is ``driver``.
``ExecutorConfig.env`` wins in any case. It all happens by a call before the worker imports anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from aexec.config import ExecutorConfig
from aexec.errors import ConfigError
from aexec.executor.lines.environment import inherited, rank_environment
from aexec.executor.ray.rerank import Ranking

__all__ = (
    "COPIED",
    "PER_NODE",
    "OwnEnvironment",
    "SentEnvironment",
    "environment_of_rank",
    "node_environment",
    "plan_environment",
)

#: Sent if ``env_allow`` is None.
COPIED = (
    "AEXEC_*", "VLLM_*", "LMCACHE_*", "NCCL_*", "UCX_*", "GLOO_*", "HF_*", "HUGGING_FACE_*", "TRANSFORMERS_*",
    "TOKENIZERS_*", "TORCH_*", "PYTORCH_*", "OMP_*", "MKL_*", "PYTHONHASHSEED",
)  # fmt: skip

_DEVICE_LISTS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")

#: Never sent, whatever ``env_allow`` says: they tell of one node, one process, or Ray's own affairs.
PER_NODE = (
    *_DEVICE_LISTS, "ROCR_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS", "ONEAPI_DEVICE_SELECTOR", "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES", "VLLM_HOST_IP", "VLLM_HOST_PORT", "VLLM_NIXL_SIDE_CHANNEL_HOST", "RAY_*", "HOSTNAME",
    "PWD", "OLDPWD", "SHLVL", "PYTEST_*",
)  # fmt: skip

#: Set by Ray in every worker that has not got it from its node.
_SET_BY_RAY = ("OMP_NUM_THREADS",)


@dataclass(frozen=True, slots=True)
class OwnEnvironment:
    """What is one rank's alone.

    Attributes:
        place: Which rank it is, as torchrun names it.
        devices: The devices that it sees: those of all ranks of its node, in the node's order.
        defaults: For what nobody has set.
    """

    place: Mapping[str, str]
    devices: tuple[str, ...]
    defaults: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SentEnvironment:
    """What all workers of a group are sent.

    Attributes:
        copied: The driver's variables, for where a node has none of that name.
        given: ``ExecutorConfig.env``.
        precedence: Whose value counts where both have one.
        runtime_env: Names that ``ray_runtime_env`` sets: nobody overrides those but ``given``.
    """

    copied: Mapping[str, str]
    given: Mapping[str, str]
    precedence: Literal["node", "driver"] = "node"
    runtime_env: frozenset[str] = field(default_factory=frozenset[str])

    def __repr__(self) -> str:
        names = ", ".join(sorted(self.shown())) or "nothing"
        return f"<SentEnvironment: {names}>"

    def shown(self) -> dict[str, str]:
        """All that is sent, for ``describe()``, which hides what looks like a secret."""
        return {**self.copied, **self.given}

    def changes(self, there: Mapping[str, str], node: Mapping[str, str], own: OwnEnvironment) -> dict[str, str]:
        """What is set in one worker.

        Args:
            there: The worker's environment, as Ray made it.
            node: That of its node, see :func:`node_environment`.
            own: What is this rank's alone.
        """
        kept = self.runtime_env if self.precedence == "driver" else self.runtime_env | node.keys()
        copied = {name: value for name, value in self.copied.items() if name not in kept}
        defaults = {name: value for name, value in own.defaults.items() if name not in {*self.runtime_env, *node}}
        lists = [name for name in _DEVICE_LISTS if name in there] or list(_DEVICE_LISTS[:1])
        devices = dict.fromkeys(lists if own.devices else (), ",".join(own.devices))
        return {**defaults, **copied, **own.place, **devices, **self.given}


def plan_environment(here: Mapping[str, str], config: ExecutorConfig, never: Sequence[str] = ()) -> SentEnvironment:
    """What workers are sent.

    Args:
        here: The driver's environment.
        config: Its rules, and ``env``.
        never: Patterns of the exclusion file.

    Raises:
        ConfigError: ``env`` says which devices workers see, which is Ray's to say.
    """
    foreign = sorted(config.env.keys() & set(PER_NODE))
    if foreign and foreign[0].endswith(("_DEVICES", "_CHIPS", "_SELECTOR", "_MASK")):
        raise ConfigError(
            f"ExecutorConfig.env[{foreign[0]!r}] is {config.env[foreign[0]]!r}: with backend 'ray' the cluster says "
            "which devices a worker has; set it where 'ray start' runs on the node"
        )
    names = frozenset(config.ray_runtime_env.get("env_vars", ()))
    copied = inherited(here, config, default=COPIED, never=(*PER_NODE, *never))
    return SentEnvironment(copied, dict(config.env), config.env_precedence, names)


def environment_of_rank(rank: int, ranking: Ranking) -> OwnEnvironment:
    """What is the rank's alone."""
    place = rank_environment(rank, ranking.local_ranks[rank], len(ranking.order), ranking.local_world_size(rank))
    return OwnEnvironment(place, ranking.visible_devices(rank), {"OMP_NUM_THREADS": str(ranking.cpus(rank))})


def node_environment(there: Mapping[str, str], raylet: Mapping[str, str]) -> dict[str, str]:
    """What the node itself says, of a worker's environment: without what Ray has set in it for its own reasons.

    Args:
        there: The worker's environment.
        raylet: That of the node's raylet, which started the worker; empty if it cannot be read.
    """
    return {name: value for name, value in there.items() if name not in _SET_BY_RAY or name in raylet}
