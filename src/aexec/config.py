"""Settings, as frozen dataclasses that refuse what cannot work and say why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aexec.errors import ConfigError

__all__ = ("CacheConfig", "ExecutorConfig", "ModelConfig", "ParallelConfig", "Restart", "SchedulerConfig")


def _at_least(owner: object, low: float, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not (value >= low and math.isfinite(value)):
            raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}: expected at least {low:g}")


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How a model is spread; ranks are laid out DP x PP x TP, TP fastest.

    Attributes:
        tensor_parallel_size: Ranks that share each layer.
        pipeline_parallel_size: Stages, each with its own layers.
        data_parallel_size: Whole replicas.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes below one."""
        _at_least(self, 1, "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")

    @property
    def world_size(self) -> int:
        """Ranks of one executor: PP x TP (each data-parallel replica is a world of its own)."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def output_rank(self) -> int:
        """The rank whose reply is the step's result: the first of the last stage."""
        return self.world_size - self.tensor_parallel_size


@dataclass(frozen=True, slots=True)
class Restart:
    """Rebuild the whole worker group after a failure.

    Attributes:
        max_restarts: Restarts within the window before the failure is final.
        within: The window, seconds.
        backoff: Seconds before the first restart; doubled each time, jittered.
    """

    max_restarts: int = 3
    within: float = 60.0
    backoff: float = 0.5

    def __post_init__(self) -> None:
        """Refuse windows and counts that mean nothing."""
        _at_least(self, 1, "max_restarts")
        _at_least(self, 0, "within", "backoff")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """How workers come to exist, and the limits of their calls.

    Attributes:
        backend: ``uni``, ``mp``, ``external_launcher``, ``ray``, ``pkg.mod:Class`` or a
            class, see ``aexec.executor.WorkerGroup``; None picks one from the layout.
        parallel: The layout.
        worker_cls: Any class, or ``pkg.mod:Class``.
        worker_init: Callables, or ``pkg.mod:function``, run in each worker before all else.
        worker_kwargs: Passed to the worker class.
        env: Set in each worker before it imports anything; refused by ``uni``, which
            shares this process.
        start_timeout: Seconds until all workers are ready.
        rpc_timeout: Default limit of ``collective_rpc``, seconds; None: no limit.
        step_timeout: Limit of a step, seconds; None: no limit.
        slow_call: Seconds after which a pending call is reported as ``SlowCall``.
        close_grace: Seconds that ``close`` gives running work before it gets rough.
        on_failure: ``"fail"``, or :class:`Restart`.
    """

    backend: str | type[Any] | None = None
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    worker_cls: str | type[Any] = "aexec.worker.model_worker:ModelWorker"
    worker_init: tuple[Any, ...] | list[Any] = ()
    worker_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    start_timeout: float = 600.0
    rpc_timeout: float | None = None
    step_timeout: float | None = 300.0
    slow_call: float = 10.0
    close_grace: float = 5.0
    on_failure: Literal["fail"] | Restart = "fail"

    def __post_init__(self) -> None:
        """Refuse limits that are not positive numbers."""
        for name in ("start_timeout", "rpc_timeout", "step_timeout", "slow_call", "close_grace"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"ExecutorConfig.{name} is {value!r}: expected a positive number of seconds")
        if self.on_failure != "fail" and not isinstance(self.on_failure, Restart):
            raise ConfigError(f'ExecutorConfig.on_failure is {self.on_failure!r}: expected "fail" or Restart(...)')


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is held.

    Attributes:
        model: ``smollm2``, ``dummy`` (with settings as ``dummy:vocab_size=64``; see
            ``model.dummy.settings``), a directory in Hugging Face's layout, or a GGUF file.
        dtype: ``auto`` takes the checkpoint's on CUDA and float32 on a CPU.
        device: ``auto`` takes CUDA where there is one.
        max_model_len: Tokens of prompt and output together; None takes the model's own limit.
        allow_untested: Load an architecture that the conformance test does not cover.
    """

    model: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    allow_untested: bool = False

    def __post_init__(self) -> None:
        """Refuse an empty name and a length without room for a prompt."""
        if not self.model:
            raise ConfigError('ModelConfig.model is empty: expected "smollm2", "dummy", a directory or a GGUF file')
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError(f"ModelConfig.dtype is {self.dtype!r}: expected auto, float32, bfloat16 or float16")
        _at_least(self, 2, "max_model_len")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache of one rank.

    Attributes:
        block_size: Token positions of a block.
        num_blocks: Blocks; None takes what the budget holds.
        memory_bytes: Budget in bytes; None takes a share of the free memory.
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuse sizes below one; block 0 is the null block, so two are the least."""
        _at_least(self, 1, "block_size", "memory_bytes")
        _at_least(self, 2, "num_blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of the queue before it.

    Attributes:
        max_num_batched_tokens: The token budget of a step.
        max_num_seqs: Requests that run at a time.
        max_num_waiting: Requests that may wait; one more is refused.
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 256
    max_num_waiting: int = 4096

    def __post_init__(self) -> None:
        """Refuse budgets below one."""
        _at_least(self, 1, "max_num_batched_tokens", "max_num_seqs", "max_num_waiting")
