"""aexec: run a model that is spread over processes and machines, and await it.

This is the front door. Each name is imported from its room when it is first used, so
that ``import aexec`` costs milliseconds and loads neither torch nor ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aexec.lazy import lazy_names

__all__ = (
    "LLM",
    "Actor",
    "ActorSystem",
    "AexecError",
    "AsyncLLM",
    "CallTimeout",
    "ConfigError",
    "ExecuteModel",
    "Executor",
    "ExecutorConfig",
    "ExecutorUnavailable",
    "ForwardLaunched",
    "InvalidRequest",
    "Message",
    "Offload",
    "ParallelConfig",
    "Ref",
    "RemoteError",
    "Restart",
    "SampleTokens",
    "SamplingParams",
    "StepId",
    "StepResult",
    "StepStateError",
    "StructuredOutput",
    "TokenChunk",
    "WorkerContext",
    "WorkerDied",
    "handles",
    "open_executor",
)
__version__ = "0.1.0"

if TYPE_CHECKING:
    from aexec.actor import Actor as Actor
    from aexec.actor import ActorSystem as ActorSystem
    from aexec.actor import Ref as Ref
    from aexec.actor import handles as handles
    from aexec.assemble import LLM as LLM
    from aexec.assemble import AsyncLLM as AsyncLLM
    from aexec.assemble import open_executor as open_executor
    from aexec.config import ExecutorConfig as ExecutorConfig
    from aexec.config import Offload as Offload
    from aexec.config import ParallelConfig as ParallelConfig
    from aexec.config import Restart as Restart
    from aexec.errors import AexecError as AexecError
    from aexec.errors import CallTimeout as CallTimeout
    from aexec.errors import ConfigError as ConfigError
    from aexec.errors import ExecutorUnavailable as ExecutorUnavailable
    from aexec.errors import InvalidRequest as InvalidRequest
    from aexec.errors import RemoteError as RemoteError
    from aexec.errors import StepStateError as StepStateError
    from aexec.errors import WorkerDied as WorkerDied
    from aexec.executor.base import Executor as Executor
    from aexec.messages import ExecuteModel as ExecuteModel
    from aexec.messages import ForwardLaunched as ForwardLaunched
    from aexec.messages import Message as Message
    from aexec.messages import SampleTokens as SampleTokens
    from aexec.messages import SamplingParams as SamplingParams
    from aexec.messages import StepId as StepId
    from aexec.messages import StepResult as StepResult
    from aexec.messages import StructuredOutput as StructuredOutput
    from aexec.messages import TokenChunk as TokenChunk
    from aexec.worker.context import WorkerContext as WorkerContext

# Where each name lives.
_ROOMS = {
    "aexec.actor": ("Actor", "ActorSystem", "Ref", "handles"),
    "aexec.assemble": ("LLM", "AsyncLLM", "open_executor"),
    "aexec.config": ("ExecutorConfig", "Offload", "ParallelConfig", "Restart"),
    "aexec.errors": (
        "AexecError",
        "CallTimeout",
        "ConfigError",
        "ExecutorUnavailable",
        "InvalidRequest",
        "RemoteError",
        "StepStateError",
        "WorkerDied",
    ),
    "aexec.executor.base": ("Executor",),
    "aexec.messages": (
        "ExecuteModel",
        "ForwardLaunched",
        "Message",
        "SampleTokens",
        "SamplingParams",
        "StepId",
        "StepResult",
        "StructuredOutput",
        "TokenChunk",
    ),
    "aexec.worker.context": ("WorkerContext",),
}
__getattr__, __dir__ = lazy_names(globals(), _ROOMS)
