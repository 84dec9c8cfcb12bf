"""A model runner's contract: one rank's model, its KV cache, and the two halves of a step.

All methods block and run on the worker's compute thread, one at a time.
"""

from __future__ import annotations

from typing import Protocol

from aexec.messages.batch import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from aexec.messages.lifecycle import ModelInfo

__all__ = ("LoadProgress", "ModelInfo", "ModelRunner")


class LoadProgress(Protocol):
    """Told how far loading has come."""

    def __call__(self, phase: str, done: float, total: float) -> None:
        """``done`` of ``total`` units of ``phase`` are through, as in ``convert``, ``weights``."""
        ...


class ModelRunner(Protocol):
    """One rank's model."""

    def load_model(self) -> None:
        """Load this rank's weights."""
        ...

    def determine_available_memory(self) -> int:
        """Bytes that the KV cache of this rank may take."""
        ...

    def initialize_cache(self, available_bytes: int) -> None:
        """Allocate the KV cache: ``CacheConfig.num_blocks``, else what the bytes hold.

        Raises:
            OutOfMemory: Not even one request of the shortest kind fits.
        """
        ...

    def compile_or_warm_up(self) -> None:
        """Run once what the first request would otherwise pay for."""
        ...

    def info(self) -> ModelInfo:
        """Facts about the model."""
        ...

    def execute_model(self, batch: SchedulerOutput) -> None:
        """Apply the deltas of ``batch``, run the forward pass, keep the logits."""
        ...

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample the oldest forward pass that was not sampled yet."""
        ...
