"""What the engine schedules, and how it constrains output."""

from __future__ import annotations

from dataclasses import dataclass

from aexec.config.checks import at_least, one_of, whole

__all__ = ("SchedulerConfig", "StructuredOutputConfig")


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
        whole(self, 1, "max_num_batched_tokens", "max_num_seqs", "max_num_waiting")
        at_least(self, 0, "recovery_timeout")


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
        one_of(self, "backend", "llguidance", "xgrammar")
        at_least(self, 0.001, "compile_timeout", "mask_timeout")
        whole(self, 1, "max_bytes", "cache_size", "num_compilers", "max_num_compiling", "num_threads")
