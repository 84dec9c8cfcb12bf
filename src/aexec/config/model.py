"""Which model, and where the KV of its requests is kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from aexec.config.checks import at_least, whole
from aexec.errors import ConfigError

__all__ = ("CacheConfig", "KVConnectorConfig", "ModelConfig", "Offload")


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
        if not isinstance(self.model, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # for users without a type checker
            raise ConfigError(f"ModelConfig.model is {self.model!r}: expected a name, or a path as text")
        if not self.model:
            raise ConfigError('ModelConfig.model is empty: expected "smollm2", "dummy", a directory or a GGUF file')
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError(f"ModelConfig.dtype is {self.dtype!r}: expected auto, float32, bfloat16 or float16")
        whole(self, 2, "max_model_len")


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
        whole(self, 1, "bytes")
        at_least(self, 0, "flush_timeout")


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
        whole(self, 1, "block_size", "memory_bytes")
        whole(self, 2, "num_blocks")
        sides = ("scheduler_side", "worker_side")
        if self.connector is not None and not all(hasattr(self.connector, side) for side in sides):
            raise ConfigError(
                f"CacheConfig.connector (kv_connector= of an engine) is {self.connector!r}: expected settings such as "
                "Offload(...), which name both sides of a connector"
            )
        if self.connector is not None and not self.prefix_caching:
            raise ConfigError(
                f"CacheConfig.connector (kv_connector= of an engine) is {self.connector!r} and prefix_caching is off: "
                "a connector finds blocks by what they hold, which is prefix caching; turn it on, or leave the "
                "connector out"
            )
