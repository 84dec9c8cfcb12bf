"""A model runner's contract: one rank's model, its KV cache, and the two halves of a step.

All methods block and run on the worker's compute thread, one at a time.
"""

from __future__ import annotations

from typing import Any, Protocol

from aexec.messages.batch import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from aexec.messages.lifecycle import ModelInfo
from aexec.model.kv_access import KVAccess
from aexec.model.operations import ModelOperations

__all__ = ("LoadProgress", "ModelInfo", "ModelRunner")


class LoadProgress(Protocol):
    """Told how far loading has come."""

    def __call__(self, phase: str, done: float, total: float) -> None:
        """``done`` of ``total`` units of ``phase`` are through, as in ``convert``, ``weights``."""
        ...


class ModelRunner(Protocol):
    """One rank's model: all of it, or its stage's layers, or a share of each of them."""

    @property
    def device(self) -> str:
        """Where its tensors are, as in ``cpu`` or ``cuda:0``."""
        ...

    @property
    def operations(self) -> ModelOperations:
        """Sleep, wake-up and new weights."""
        ...

    @property
    def kv_access(self) -> KVAccess:
        """The KV cache block by block, for a connector; to be used once there is a cache."""
        ...

    def join(self, tensor_group: Any) -> None:
        """Take the process group of the ranks that share its layers; before ``load_model``, where there are such."""
        ...

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

    def execute_stage(self, batch: SchedulerOutput, incoming: Any = None) -> Any:
        """:meth:`execute_model` of one pipeline stage.

        Args:
            batch: The same on every stage.
            incoming: Hidden states from the stage before; None on the first, and in a step without tokens.

        Returns:
            Hidden states for the next stage; None on the last one, which keeps the logits,
            and in a step without tokens.
        """
        ...

    def blank_hidden(self, num_tokens: int) -> Any:
        """Something of the kind and shape that hidden states of a step have, between two stages."""
        ...

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample the oldest forward pass that was not sampled yet."""
        ...
