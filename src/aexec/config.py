"""Settings, as frozen dataclasses that refuse what cannot work and say why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from aexec.errors import ConfigError

__all__ = (
    "CacheConfig",
    "ExecutorConfig",
    "KVConnectorConfig",
    "ModelConfig",
    "Offload",
    "ParallelConfig",
    "Restart",
    "SchedulerConfig",
    "StructuredOutputConfig",
)


def _at_least(owner: object, low: float, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not (value >= low and math.isfinite(value)):
            raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}: expected at least {low:g}")


def _one_of(owner: object, name: str, *choices: str) -> None:
    value = getattr(owner, name)
    if value not in choices:
        raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}: expected one of {', '.join(choices)}")


def _mapping(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}: expected a dict")


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How a model is spread; ranks are laid out DP x PP x TP, TP fastest.

    Attributes:
        tensor_parallel_size: Ranks that share each layer.
        pipeline_parallel_size: Stages, each with its own layers.
        data_parallel_size: Whole replicas.
        pipeline_partition: Layers of each stage; None balances them.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    pipeline_partition: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse sizes below one, and a partition of another number of stages."""
        _at_least(self, 1, "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        partition = self.pipeline_partition
        if partition is not None and (len(partition) != self.pipeline_parallel_size or min(partition) < 1):
            raise ConfigError(
                f"ParallelConfig.pipeline_partition is {partition}: expected {self.pipeline_parallel_size} numbers "
                "of layers, one for each stage"
            )

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
        worker_extension: Classes, or ``pkg.mod:Class``, whose methods the worker class gets
            besides its own; see ``aexec.worker.extend``.
        worker_kwargs: Passed to the worker class.
        env: Set in each worker before it imports anything; refused by ``uni``, which
            shares this process.
        env_allow: Patterns of variables that workers inherit, all by default; those that no
            interpreter can do without are inherited in any case.
        env_deny: Patterns of variables that they do not inherit, stronger than ``env_allow``.
        start_method: How backend ``mp`` makes processes: ``forkserver`` imports once, in a
            process of its own, and forks that; ``spawn`` starts fresh interpreters. The
            driver itself is never forked.
        preload: Modules that the fork server imports before it forks; None: what the worker
            class that ships needs. They must start no threads and touch no device.
        worker_output: Where lines go that workers print: ``stderr`` (with the rank in front),
            ``log``, or ``none``. Errors quote the last ones in any case.
        spin: Seconds that a worker process polls for its next message before it sleeps; None:
            200 microseconds if there is a CPU to spare, else none.
        start_timeout: Seconds that a start may go without any progress of any rank.
        rpc_timeout: Default limit of ``collective_rpc``, seconds; None: no limit.
        step_timeout: Limit of a step, seconds; None: no limit.
        on_timeout: What a call past its limit means that had started: ``"fail_call"``, the
            end of this call alone; ``"fail_executor"``, a failure of the group, to which
            ``on_failure`` applies.
        max_concurrent_steps: Steps in flight; more of them wait their turn. None: 8, or the
            stages of the pipeline and one.
        distributed_timeout: Seconds that a rank waits for another one, in a collective or for hidden states.
        slow_call: Seconds after which a pending call is reported as ``SlowCall``.
        close_grace: Seconds that ``close`` gives running work before it gets rough.
        term_grace: Seconds after that from ``SIGTERM`` to ``SIGKILL``.
        kill_grace: Seconds that a killed process may take to be gone.
        on_failure: ``"fail"``, or :class:`Restart`.
    """

    backend: str | type[Any] | None = None
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    worker_cls: str | type[Any] = "aexec.worker.model_worker:ModelWorker"
    worker_init: tuple[Any, ...] | list[Any] = ()
    worker_extension: Sequence[str | type[Any]] = ()
    worker_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    env_allow: Sequence[str] = ("*",)
    env_deny: Sequence[str] = ()
    start_method: Literal["forkserver", "spawn"] = "forkserver"
    preload: Sequence[str] | None = None
    worker_output: Literal["stderr", "log", "none"] = "stderr"
    spin: float | None = None
    start_timeout: float = 600.0
    rpc_timeout: float | None = None
    step_timeout: float | None = 300.0
    on_timeout: Literal["fail_call", "fail_executor"] = "fail_call"
    max_concurrent_steps: int | None = None
    distributed_timeout: float = 300.0
    slow_call: float = 10.0
    close_grace: float = 2.0
    term_grace: float = 2.0
    kill_grace: float = 2.0
    on_failure: Literal["fail"] | Restart = "fail"

    def __post_init__(self) -> None:
        """Refuse limits that are not positive numbers, and settings of the wrong kind."""
        for name in (
            "start_timeout", "rpc_timeout", "step_timeout", "distributed_timeout", "slow_call", "close_grace",
            "term_grace", "kill_grace",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"ExecutorConfig.{name} is {value!r}: expected a positive number of seconds")
        _mapping(self, "worker_kwargs", "env")
        for name, value in self.env.items():
            if not (isinstance(name, str) and isinstance(value, str)):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(f"ExecutorConfig.env[{name!r}] is {value!r}: expected text for name and value")
        _at_least(self, 0, "spin")
        _at_least(self, 1, "max_concurrent_steps")
        _one_of(self, "on_timeout", "fail_call", "fail_executor")
        if isinstance(self.worker_extension, str | type):
            raise ConfigError(
                f"ExecutorConfig.worker_extension is {self.worker_extension!r}: expected a list of classes or of "
                "'package.module:Class'"
            )
        _one_of(self, "start_method", "forkserver", "spawn")
        _one_of(self, "worker_output", "stderr", "log", "none")
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


class KVConnectorConfig(Protocol):
    """Settings of a KV connector; they name its two sides, each a class, or ``package.module:Class``.

    Attributes:
        scheduler_side: Made with the settings, and 4 random bytes; see ``aexec.engine.connector.base``.
        worker_side: Made on each rank, with the settings, the rank, the number of ranks, and the
            runner's ``KVAccess``; see ``aexec.worker.kv.base``.
    """

    scheduler_side: ClassVar[str | type[Any]]
    worker_side: ClassVar[str | type[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Keep KV blocks for which the cache has no room any longer, and bring them back when they are asked for.

    Attributes:
        bytes: What may be kept at most: in host memory, by all ranks together; in a directory,
            by all processes together that share it.
        directory: Where to keep them; they outlive the process then, and are found again by the
            same model in the same layout. None: in the workers' memory, as long as they live.
        flush_timeout: Seconds that closing may take to write what the cache itself still holds;
            with a directory only. 0: that is lost.
    """

    bytes: int = 4 * 2**30
    directory: str | Path | None = None
    flush_timeout: float = 30.0
    scheduler_side: ClassVar[str | type[Any]] = "aexec.engine.connector.offload:OffloadConnector"
    worker_side: ClassVar[str | type[Any]] = "aexec.worker.kv.offload:RankOffload"

    def __post_init__(self) -> None:
        """Refuse a limit that holds nothing."""
        _at_least(self, 1, "bytes")
        _at_least(self, 0, "flush_timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache of one rank.

    Attributes:
        block_size: Token positions of a block.
        num_blocks: Blocks; None takes what the budget holds.
        memory_bytes: Budget in bytes; None takes a share of the free memory.
        prefix_caching: Requests that begin alike share the KV of what they begin with.
        connector: Keeps blocks elsewhere, as :class:`Offload` does; needs ``prefix_caching``.
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory_bytes: int | None = None
    prefix_caching: bool = True
    connector: KVConnectorConfig | None = None

    def __post_init__(self) -> None:
        """Refuse sizes below one; block 0 is the null block, so two are the least."""
        _at_least(self, 1, "block_size", "memory_bytes")
        _at_least(self, 2, "num_blocks")
        if self.connector is not None and not self.prefix_caching:
            raise ConfigError(
                f"CacheConfig.connector (kv_connector= of an engine) is {self.connector!r} and prefix_caching is off: "
                "a connector finds blocks by what they hold, which is prefix caching; turn it on, or leave the "
                "connector out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of the queue before it.

    Attributes:
        max_num_batched_tokens: The token budget of a step.
        max_num_seqs: Requests that run at a time.
        max_num_waiting: Requests that may wait; one more is refused.
        recovery_timeout: Seconds that a request which has not begun waits for workers that are
            being rebuilt; None: for as long as that takes.
        async_scheduling: Schedule and launch a step before the tokens of the last one are back;
            None: where that is possible; True where it is not is a ``ConfigError`` when the engine opens.
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 256
    max_num_waiting: int = 4096
    recovery_timeout: float | None = 60.0
    async_scheduling: bool | None = None

    def __post_init__(self) -> None:
        """Refuse budgets below one."""
        _at_least(self, 1, "max_num_batched_tokens", "max_num_seqs", "max_num_waiting")
        _at_least(self, 0, "recovery_timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputConfig:
    """How the grammars of requests are compiled, and what they may cost.

    Attributes:
        backend: ``llguidance`` or ``xgrammar``, for requests that name none.
        compile_timeout: Seconds that one grammar may take to compile; then its request fails.
        max_bytes: Length of a schema, an expression or a grammar at most.
        cache_size: Compiled grammars that are kept, the latest used.
        num_compilers: Processes that compile at a time; each is started when it is needed first.
        max_num_compiling: Different grammars that may be compiled or wait for it at a time; the request of one more is
            refused (``QueueFull``).
        mask_timeout: Seconds that the mask of one request may hold up a step; then that request fails.
        num_threads: Threads that share the masks of a step.
        preload: Make the library ready while the engine opens, if it is installed: 0.3 s for 50,000
            tokens, in which nothing else runs. Otherwise the first such request does it.
    """

    backend: str = "llguidance"
    compile_timeout: float = 10.0
    max_bytes: int = 1 << 20
    cache_size: int = 64
    num_compilers: int = 2
    max_num_compiling: int = 4096
    mask_timeout: float = 2.0
    num_threads: int = 2
    preload: bool = True

    def __post_init__(self) -> None:
        """Refuse a library that is not known, and limits that nothing meets."""
        _one_of(self, "backend", "llguidance", "xgrammar")
        _at_least(self, 0.001, "compile_timeout", "mask_timeout")
        _at_least(self, 1, "max_bytes", "cache_size", "num_compilers", "max_num_compiling", "num_threads")
