"""The composition root: the only file that names concrete classes of different rooms."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

from aexec import environ
from aexec.config import CacheConfig, ExecutorConfig, ModelConfig
from aexec.engine.assembly import Assembly, ModelText
from aexec.engine.bytes_text import ByteTokenizer
from aexec.engine.hub_text import load_tokenizer, read_eos_token_ids
from aexec.engine.llm import AsyncLLM as _AsyncLLM
from aexec.engine.sync import LLM as _LLM
from aexec.errors import ConfigError
from aexec.executor.base import Executor
from aexec.executor.external.group import ExternalGroup
from aexec.executor.group import WorkerGroup
from aexec.executor.handle import start_executor
from aexec.executor.lines.environment import visible_devices
from aexec.executor.multiproc import MultiprocGroup
from aexec.executor.multiproc.nodes.group import NodesGroup
from aexec.executor.multiproc.recipe import installed_devices
from aexec.executor.open import Opening
from aexec.executor.ray.group import RayGroup
from aexec.executor.select import select_backend
from aexec.executor.uniproc import UniprocGroup
from aexec.model.dummy.settings import DummySettings, is_dummy
from aexec.model.sources.resolve import resolve_model
from aexec.worker.context import Progress
from aexec.worker.names import load

__all__ = ("BACKENDS", "LLM", "AsyncLLM", "open_executor")

#: By the name that ``ExecutorConfig.backend`` gives.
BACKENDS: dict[str, type[WorkerGroup]] = {
    group.backend: group for group in (UniprocGroup, MultiprocGroup, ExternalGroup, RayGroup)
}


def open_executor(config: ExecutorConfig, *, progress: Progress | None = None) -> Opening:
    """Start the workers of an executor; await the result, or enter it.

    ::

        async with open_executor(config) as executor: ...
        executor = await open_executor(config)  # and later: await executor.close()

    A start that fails or is cancelled leaves nothing behind.

    Args:
        config: The settings.
        progress: Told ``(phase, done, total)`` while the workers start, on this loop;
            the figures are sums over all ranks.

    Raises:
        ConfigError: There is no such backend, or it cannot serve these settings, or the
            worker class cannot be made.
        CallTimeout: ``start_timeout`` has passed.
        WorkerDied: A rank ended.
        RemoteError: What a worker raised, which also is an instance of its own type.
    """

    async def start() -> Executor:
        backend = _backend(config)
        if issubclass(backend, WorkerGroup):
            return await start_executor(config, backend, progress)
        opened: Executor = await backend.open(config, progress=progress)
        return opened

    return Opening(start)


def _backend(config: ExecutorConfig) -> type[Any]:
    """The class behind ``config.backend``: a ``WorkerGroup``, or whatever has an async ``open``."""
    if isinstance(config.backend, type):
        found: Any = config.backend
    else:
        name = _selected(config)
        found = BACKENDS.get(name) or load(name, "ExecutorConfig.backend")
    if found is MultiprocGroup and config.nnodes > 1:
        found = NodesGroup
    if isinstance(found, type) and issubclass(found, WorkerGroup):
        return found
    if isinstance(found, type) and inspect.iscoroutinefunction(getattr(found, "open", None)):
        return found
    raise ConfigError(
        f"backend {config.backend!r} is not one: expected a subclass of aexec.executor.WorkerGroup, "
        "or a class with 'async def open(cls, config, *, progress)' that returns an executor"
    )


def _selected(config: ExecutorConfig) -> str:
    if config.backend is not None:
        return select_backend(config, BACKENDS)
    seen = visible_devices(environ.inherited(), installed_devices())
    return select_backend(config, BACKENDS, devices=len(seen), has_ray=importlib.util.find_spec("ray") is not None)


class _Assembly:
    """Gives the engine the executors and the models that ship."""

    def load_text(self, model: ModelConfig, progress: Progress) -> ModelText:
        """Find the model, convert it if that is due, and load its tokenizer."""
        if is_dummy(model.model):
            return ModelText(ByteTokenizer(), (DummySettings.parse(model.model).eos_token_id,))
        directory = resolve_model(model.model, progress=progress).directory
        return ModelText(load_tokenizer(directory), read_eos_token_ids(directory))

    async def open_executor(self, config: ExecutorConfig, progress: Progress) -> Executor:
        """Start the workers."""
        return await open_executor(config, progress=progress)

    def worker_kwargs(self, model: ModelConfig, cache: CacheConfig) -> Mapping[str, Any]:
        """What ``ModelWorker`` takes."""
        return {"model_config": model, "cache_config": cache}


class AsyncLLM(_AsyncLLM):
    """A model that an asyncio program awaits, on the executors that ship."""

    assembly: ClassVar[Assembly] = _Assembly()


class LLM(_LLM):
    """A blocking :class:`AsyncLLM`, which also works where an event loop runs already."""

    engine_class: ClassVar[type[_AsyncLLM]] = AsyncLLM


AsyncLLM.__doc__, LLM.__doc__ = _AsyncLLM.__doc__, _LLM.__doc__
