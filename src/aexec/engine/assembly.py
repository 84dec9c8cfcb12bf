"""What the engine needs of rooms that it does not know; ``aexec.assemble`` provides it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from aexec.config import CacheConfig, ExecutorConfig, ModelConfig
from aexec.engine.text import Tokenizer
from aexec.errors import ConfigError
from aexec.executor.base import Executor

__all__ = ("Assembly", "ModelText", "Progress", "running_loop")


class Progress(Protocol):
    """Told how far opening has come, on the event loop."""

    def __call__(self, phase: str, done: float, total: float) -> None:
        """``done`` of ``total`` units of ``phase`` are through, as in ``convert``, ``load_model``."""
        ...


class ModelText(NamedTuple):
    """The text side of a model.

    Attributes:
        tokenizer: None: the engine speaks token ids only.
        eos_token_ids: The model's own end tokens.
    """

    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]


class Assembly(Protocol):
    """Where executors and tokenizers come from."""

    def load_text(self, model: ModelConfig, progress: Progress) -> ModelText:
        """Find the model and load its tokenizer; blocks, and calls ``progress`` from its own thread.

        Raises:
            ModelNotFound: The name leads nowhere.
            ModelLoadError: A file is damaged.
        """
        ...

    async def open_executor(self, config: ExecutorConfig, progress: Progress) -> Executor:
        """Start the workers; the caller closes the executor."""
        ...

    def worker_kwargs(self, model: ModelConfig, cache: CacheConfig) -> Mapping[str, Any]:
        """What a model worker is to be constructed with."""
        ...


def running_loop() -> asyncio.AbstractEventLoop:
    """The loop that an engine is opened on.

    Raises:
        ConfigError: It is none of asyncio's.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigError("engines run on asyncio, uvloop included; this is another kind of event loop") from None
