"""How workers come to exist, and the limits of their calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from aexec.config.checks import at_least, mapping, one_of, seconds, sequence_of_text, whole
from aexec.config.nodes import NodeOptions
from aexec.config.parallel import ParallelConfig
from aexec.config.ray import RayOptions
from aexec.errors import ConfigError

__all__ = ("DEFAULT_ARENA_BYTES", "ExecutorConfig", "Restart")

DEFAULT_ARENA_BYTES = 1 << 30

_WITHOUT_RAY = ("uni", "mp", "external_launcher")
_WITHOUT_NODES = ("uni", "ray", "external_launcher")


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
        whole(self, 1, "max_restarts")
        at_least(self, 0, "within", "backoff")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig(RayOptions, NodeOptions):
    """How workers come to exist, and the limits of their calls.

    What backend ``ray`` takes besides is described at ``RayOptions``, and what ``mp`` takes on several nodes
    at ``NodeOptions``.

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
        env_allow: Patterns of variables that workers inherit; those that no interpreter can do
            without are inherited in any case on this machine. None: all with ``mp``; with ``ray``
            those of aexec, torch, NCCL and the like, see ``aexec.executor.ray.environment``.
        env_extra: Patterns of variables that they inherit besides those of ``env_allow``.
        env_deny: Patterns of variables that they do not inherit, stronger than both.
        env_precedence: Whose value counts where the worker's machine has a variable as well that
            is inherited: the ``"node"``'s, or the ``"driver"``'s. ``env`` counts in any case.
        start_method: How backend ``mp`` makes processes: ``forkserver`` imports once, in a
            process of its own, and forks that; ``spawn`` starts fresh interpreters. The
            driver itself is never forked.
        preload: Modules that the fork server imports before it forks; None: what the worker
            class that ships needs. They must start no threads and touch no device.
        worker_output: Where lines go that workers print: ``stderr`` (with the rank in front),
            ``log``, or ``none``. Errors quote the last ones in any case.
        spin: Seconds that driver and workers poll for the next message before they sleep, while
            recent messages came as soon as that; whoever else wants the CPU gets it. None: 200
            microseconds, or 0 on a single CPU.
        arena_bytes: Shared memory, in bytes, that each process may use at most for arrays on their way
            and for those that a receiver still holds; none is taken before it is needed. To other
            nodes, the size of a message. As many bytes may wait on a line for a peer that does not
            read, before the next message is ``ChannelFull``.
        start_timeout: Seconds that a start may go without any progress of any rank.
        rpc_timeout: Default limit of ``collective_rpc``, seconds; None: no limit.
        step_timeout: Limit of a step, seconds; None: no limit.
        on_timeout: What a call past its limit means that had started: ``"fail_call"``, the
            end of this call alone; ``"fail_executor"``, a failure of the group, to which
            ``on_failure`` applies.
        max_concurrent_steps: Steps in flight; more of them wait their turn. None: 8, or the
            stages of the pipeline and one.
        distributed_timeout: Seconds that a rank waits for another one, in a collective or for hidden states.
        divergence_check: With ``external_launcher``: compare the calls of all ranks, so that one that
            differs is an error on all of them; False: take it on trust, and save a message for each.
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
    env_allow: Sequence[str] | None = None
    env_extra: Sequence[str] = ()
    env_deny: Sequence[str] = ()
    env_precedence: Literal["node", "driver"] = "node"
    start_method: Literal["forkserver", "spawn"] = "forkserver"
    preload: Sequence[str] | None = None
    worker_output: Literal["stderr", "log", "none"] = "stderr"
    spin: float | None = None
    arena_bytes: int = DEFAULT_ARENA_BYTES
    start_timeout: float = 600.0
    rpc_timeout: float | None = None
    step_timeout: float | None = 300.0
    on_timeout: Literal["fail_call", "fail_executor"] = "fail_call"
    max_concurrent_steps: int | None = None
    distributed_timeout: float = 300.0
    divergence_check: bool = True
    slow_call: float = 10.0
    close_grace: float = 2.0
    term_grace: float = 2.0
    kill_grace: float = 2.0
    on_failure: Literal["fail"] | Restart = "fail"

    def __post_init__(self) -> None:
        """Refuse limits that are not positive numbers, and settings of the wrong kind."""
        RayOptions.__post_init__(self)
        NodeOptions.__post_init__(self)
        seconds(
            self, "start_timeout", "rpc_timeout", "step_timeout", "distributed_timeout", "slow_call", "close_grace",
            "term_grace", "kill_grace",
        )  # fmt: skip
        mapping(self, "worker_kwargs", "env")
        for name, value in self.env.items():
            if not (isinstance(name, str) and isinstance(value, str)):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(f"ExecutorConfig.env[{name!r}] is {value!r}: expected text for name and value")
        sequence_of_text(self, "env_allow", "env_extra", "env_deny", "preload")
        one_of(self, "env_precedence", "node", "driver")
        at_least(self, 0, "spin")
        whole(self, 1, "max_concurrent_steps")
        whole(self, 65536, "arena_bytes")
        one_of(self, "on_timeout", "fail_call", "fail_executor")
        self._check_lists_of("worker_extension", "classes or of 'package.module:Class'")
        self._check_lists_of("worker_init", "functions or of 'package.module:function'")
        one_of(self, "start_method", "forkserver", "spawn")
        one_of(self, "worker_output", "stderr", "log", "none")
        if self.on_failure != "fail" and not isinstance(self.on_failure, Restart):
            raise ConfigError(f'ExecutorConfig.on_failure is {self.on_failure!r}: expected "fail" or Restart(...)')
        foreign = self.ray_settings() if isinstance(self.backend, str) and self.backend in _WITHOUT_RAY else ()
        if foreign:
            raise ConfigError(
                f"ExecutorConfig.{foreign[0]} is {getattr(self, foreign[0])!r} and backend is {self.backend!r}: that is "
                "a setting of backend='ray'; take that one, or leave it out"
            )
        elsewhere = self.node_settings() if isinstance(self.backend, str) and self.backend in _WITHOUT_NODES else ()
        if elsewhere:
            raise ConfigError(
                f"ExecutorConfig.{elsewhere[0]} is {getattr(self, elsewhere[0])!r} and backend is {self.backend!r}: that "
                "is a setting of backend='mp'; take that one, or leave it out"
            )

    def _check_lists_of(self, name: str, what: str) -> None:
        value: object = getattr(self, name)
        if isinstance(value, str) or callable(value):  # the letters of a text would be taken one by one
            raise ConfigError(f"ExecutorConfig.{name} is {value!r}: expected a list of {what}")
