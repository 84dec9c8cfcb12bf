"""Settings, as frozen dataclasses that refuse what cannot work and say why."""

from __future__ import annotations

from aexec.config.engine import SchedulerConfig as SchedulerConfig
from aexec.config.engine import StructuredOutputConfig as StructuredOutputConfig
from aexec.config.executor import ExecutorConfig as ExecutorConfig
from aexec.config.executor import Restart as Restart
from aexec.config.model import CacheConfig as CacheConfig
from aexec.config.model import KVConnectorConfig as KVConnectorConfig
from aexec.config.model import ModelConfig as ModelConfig
from aexec.config.model import Offload as Offload
from aexec.config.nodes import NodeOptions as NodeOptions
from aexec.config.parallel import ParallelConfig as ParallelConfig
from aexec.config.ray import RayOptions as RayOptions

__all__ = (
    "CacheConfig",
    "ExecutorConfig",
    "KVConnectorConfig",
    "ModelConfig",
    "NodeOptions",
    "Offload",
    "ParallelConfig",
    "RayOptions",
    "Restart",
    "SchedulerConfig",
    "StructuredOutputConfig",
)
