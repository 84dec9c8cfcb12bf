"""``AsyncLLM``: a model that an asyncio program awaits.

Opening it finds the model, loads its tokenizer, opens an executor and starts the driver;
closing it ends them in the opposite order. Both may happen in different tasks, as in a
server's lifespan or in two notebook cells.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from os import PathLike, fspath
from typing import Any, ClassVar, Literal, Self, cast

from anyio import to_thread

from aexec.actor import ActorStatistics
from aexec.config import (
    CacheConfig,
    ExecutorConfig,
    KVConnectorConfig,
    ModelConfig,
    ParallelConfig,
    Restart,
    SchedulerConfig,
    StructuredOutputConfig,
)
from aexec.engine.assembly import Assembly, ModelText, Progress, running_loop
from aexec.engine.completion import Completion, collect
from aexec.engine.frontend import Frontend, start_driver
from aexec.engine.generation import Generation, check_request
from aexec.engine.operations import EngineOperations
from aexec.engine.overlap import AsyncScheduling
from aexec.engine.statistics import EngineStatistics
from aexec.engine.text import Tokenizer
from aexec.errors import ConfigError, ExecutorClosed, InvalidRequest
from aexec.executor.base import Executor
from aexec.messages.lifecycle import ModelInfo
from aexec.messages.request import RequestOptions, SamplingParams

__all__ = ("AsyncLLM",)

Prompt = str | Sequence[int]


class AsyncLLM(EngineOperations):
    """A model, its executor, and the driver that runs requests on them.

    ``async with AsyncLLM("smollm2") as llm`` opens and closes it; so do ``open()`` and
    ``aclose()``. Nothing happens before.

    Args:
        model: ``smollm2``, ``dummy``, a directory in Hugging Face's layout, or a GGUF file.
        executor: A backend's name (None: ``uni`` for one rank, ``mp`` for several), an ``ExecutorConfig`` with
            all other settings of workers (it may hold the layout and ``on_failure`` too), or an open
            executor, which stays yours to close.
        tensor_parallel_size: Ranks that share each layer.
        pipeline_parallel_size: Stages.
        dtype: ``auto`` takes the checkpoint's on CUDA and float32 on a CPU.
        device: ``auto`` takes CUDA where there is one.
        max_model_len: Tokens of prompt and output together; None: the model's own limit.
        block_size: Token positions of a KV block.
        num_blocks: KV blocks; None takes what the memory holds.
        kv_cache_memory_bytes: Memory for the KV cache; None takes a share of what is free.
        prefix_caching: Requests that begin alike share the KV of what they begin with.
        kv_connector: Keeps KV that the cache has no room for, as ``Offload(bytes=...)`` does in
            host memory and ``Offload(directory=...)`` in files.
        max_num_batched_tokens: The token budget of a step.
        max_num_seqs: Requests that run at a time.
        max_num_waiting: Requests that may wait; one more is turned away (``QueueFull``).
        max_logprobs: Most log-probabilities that a request may ask for.
        allow_untested: Load an architecture that the conformance test does not cover.
        seed: Seeds the draw of seeds for sampled requests that bring none.
        structured_output: Limits of what requests may ask for by ``SamplingParams.structured``.
        on_failure: ``"fail"``: workers that are lost end all streams. ``Restart(...)``: they are
            rebuilt, and streams go on where they were.
        recovery_timeout: Seconds that a request waits which comes while the workers are being
            rebuilt, before it ends with ``EngineRecovering``; None: for as long as that takes.
        async_scheduling: Launch a step before the tokens of the last one are back, which hides the
            engine's own time behind the model's; None: where that is possible. True: it must be, or
            :meth:`open` says why it is not.
        progress: Told ``(phase, done, total)`` while it opens, on the event loop.

    Raises:
        ConfigError: A setting cannot be meant.
    """

    assembly: ClassVar[Assembly]

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        executor: str | ExecutorConfig | Executor | type[Any] | None = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        prefix_caching: bool = True,
        kv_connector: KVConnectorConfig | None = None,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 256,
        max_num_waiting: int = 4096,
        max_logprobs: int = 20,
        allow_untested: bool = False,
        seed: int | None = None,
        structured_output: StructuredOutputConfig | None = None,
        on_failure: Literal["fail"] | Restart = "fail",
        recovery_timeout: float | None = 60.0,
        async_scheduling: bool | None = None,
        progress: Progress | None = None,
    ) -> None:
        name = fspath(model) if isinstance(model, PathLike) else model
        self.model = ModelConfig(
            model=name, dtype=dtype, device=device, max_model_len=max_model_len, allow_untested=allow_untested
        )
        self.cache = CacheConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            memory_bytes=kv_cache_memory_bytes,
            prefix_caching=prefix_caching,
            connector=kv_connector,
        )
        self.scheduling = SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_num_waiting=max_num_waiting,
            recovery_timeout=recovery_timeout,
            async_scheduling=async_scheduling,
        )
        self.structured_output = structured_output or StructuredOutputConfig()
        parallel = ParallelConfig(tensor_parallel_size, pipeline_parallel_size)
        self._given = _executor_or_config(executor, parallel, on_failure)
        self._max_logprobs, self._progress = max_logprobs, progress or _silent
        self._random = random.Random(seed)  # noqa: S311  # sampling is no cryptography
        self._reseed = self._random.seed if seed is None else None
        self._numbers = itertools.count(1)
        self._turn = asyncio.Lock()  # opening and closing take turns
        self._stack: AsyncExitStack | None = None
        self._frontend: Frontend | None = None

    # ------------------------------------------------------------ life

    async def open(self) -> Self:
        """Find the model, start the workers and the driver; does nothing when it is open.

        Raises:
            ConfigError: The model or the layout cannot be.
            ModelLoadError: The model's files are damaged.
            OutOfMemory: The model or its KV cache does not fit.
            AexecError: A worker did not start.
        """
        async with self._turn:
            if self._stack is None:
                async with AsyncExitStack() as stack:
                    self._frontend = await self._start(stack)
                    self._stack = stack.pop_all()
        return self

    async def aclose(self) -> None:
        """End the driver, which ends all streams, then the executor if it is ours."""
        async with self._turn:
            stack, self._stack, self._frontend = self._stack, None, None
            if stack is not None:
                await stack.aclose()

    async def __aenter__(self) -> Self:
        """Open it."""
        return await self.open()

    async def __aexit__(self, *exc_info: object) -> None:
        """Close it."""
        await self.aclose()

    # ------------------------------------------------------------ requests

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
    ) -> Generation:
        """Run one request; iterate over what is returned, and leave it to abort the request.

        Args:
            prompt: Text, or token ids.
            sampling: How to sample; by default 16 tokens at temperature 1.
            request_id: An id of your own, for logs and :meth:`abort`.
            priority: The lower, the earlier it is admitted, and the later it gives way when the
                KV cache is full; equal ones go in order of arrival.
            timeout: Seconds from its first chunk's ``anext`` to its end, waiting included; past
                it the stream ends with ``RequestTimeout``. None: no limit.
            cache_salt: Shares the prefix cache with requests of the same salt only.

        Returns:
            An async iterator of ``TokenChunk``; its first chunk raises ``InvalidRequest``
            when the request cannot be run.

        Raises:
            ExecutorClosed: The engine is not open.
            InvalidRequest: ``sampling`` is something else, or another argument cannot be meant.
            QueueFull: ``n`` alone is more than may ever wait.
        """
        frontend = self._opened()
        if request_id is None:
            request_id = f"request-{next(self._numbers)}"
        check_request(request_id, sampling, self.scheduling.max_num_waiting)
        options = RequestOptions(priority=priority, timeout=timeout, cache_salt=cache_salt)
        return Generation(frontend, request_id, prompt, sampling or SamplingParams(), options)

    async def complete(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
    ) -> Completion:
        """Run one request to its end; takes and raises what :meth:`generate` does."""
        generation = self.generate(
            prompt, sampling, request_id=request_id, priority=priority, timeout=timeout, cache_salt=cache_salt
        )
        async with generation:
            return await collect(generation.merged())

    async def abort(self, request_id: str) -> bool:
        """End a request by its id: its stream ends with the finish reason ``abort``.

        Returns:
            False when there is no such request, or it has ended.
        """
        return await self._opened().abort(request_id)

    def chat_prompt(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The prompt for a conversation, by the model's own template.

        Args:
            messages: As in ``[{"role": "user", "content": "Hello"}]``.

        Raises:
            InvalidRequest: The model has no chat template, or it refuses the messages.
        """
        return self.tokenizer.chat_prompt(messages)

    # ------------------------------------------------------------ looking at it

    @property
    def is_open(self) -> bool:
        """True between opening and closing."""
        return self._frontend is not None

    @property
    def executor(self) -> Executor:
        """The executor that runs the steps."""
        return self._opened().executor

    @property
    def async_scheduling(self) -> AsyncScheduling:
        """Whether a step is launched before the tokens of the last one are back, and why."""
        return self._opened().async_scheduling

    @property
    def model_info(self) -> ModelInfo:
        """Facts about the loaded model."""
        return self._opened().model_info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            InvalidRequest: It has none.
        """
        tokenizer = self._opened().tokenizer
        if tokenizer is None:
            raise InvalidRequest(f"model {self.model.model!r} has no tokenizer.json: it takes and gives token ids only")
        return tokenizer

    async def statistics(self) -> EngineStatistics:
        """Requests, steps, blocks and crashes in numbers, after all that was asked before."""
        return await self._opened().statistics()

    def driver_statistics(self) -> ActorStatistics:
        """The driver's mailbox and its seconds of work: how busy the engine itself is."""
        return self._opened().driver.statistics()

    def __repr__(self) -> str:
        """As in ``<AsyncLLM 'smollm2': open on <...>>``."""
        frontend, state = self._frontend, "closed"
        if frontend is not None:
            is_on, why = frontend.async_scheduling
            state = f"open on {frontend.executor!r}, async scheduling {'on' if is_on else 'off'}: {why}"
        return f"<{type(self).__name__} {self.model.model!r}: {state}>"

    # ------------------------------------------------------------ how it opens

    def _opened(self) -> Frontend:
        if self._frontend is None:
            raise ExecutorClosed(
                f"{type(self).__name__}({self.model.model!r}) is not open: use `async with` around it, or await open()"
            )
        return self._frontend

    async def _start(self, stack: AsyncExitStack) -> Frontend:
        text = await self._load_text()
        executor = await self._open_executor(stack)
        return await start_driver(
            stack,
            executor,
            text,
            self.scheduling,
            self.cache,
            self.structured_output,
            max_logprobs=self._max_logprobs,
            draw_seed=self._draw_seed,
            reseed=self._reseed,
            is_guest=executor is self._given,
        )

    async def _load_text(self) -> ModelText:
        loop, is_cancelled = running_loop(), False

        def progress(phase: str, done: float, total: float) -> None:
            if is_cancelled:  # a conversion ends here, in its own thread
                raise asyncio.CancelledError
            loop.call_soon_threadsafe(self._progress, phase, done, total)

        try:
            return await to_thread.run_sync(self.assembly.load_text, self.model, progress, abandon_on_cancel=True)
        except asyncio.CancelledError:
            is_cancelled = True
            raise

    async def _open_executor(self, stack: AsyncExitStack) -> Executor:
        if not isinstance(self._given, ExecutorConfig):
            return self._given
        kwargs = {**self.assembly.worker_kwargs(self.model, self.cache), **self._given.worker_kwargs}
        config = dataclasses.replace(self._given, worker_kwargs=kwargs)
        executor = await self.assembly.open_executor(config, self._progress)
        stack.push_async_callback(executor.close)
        return executor

    def _draw_seed(self) -> int:
        return self._random.getrandbits(63)


def _executor_or_config(
    executor: Any, parallel: ParallelConfig, on_failure: Literal["fail"] | Restart
) -> ExecutorConfig | Executor:
    """What is to be opened, or is open already."""
    if executor is None or isinstance(executor, str | type):
        return ExecutorConfig(backend=executor, parallel=parallel, on_failure=on_failure)
    if isinstance(executor, ExecutorConfig):
        return dataclasses.replace(
            executor,
            parallel=_agreed("parallel", executor.parallel, parallel, ParallelConfig()),
            on_failure=_agreed("on_failure", executor.on_failure, on_failure, "fail"),
        )
    if not hasattr(executor, "execute_model"):
        raise ConfigError(
            f"executor is {executor!r}: expected a backend's name, an ExecutorConfig, or an open executor "
            "(await open_executor(config) first)"
        )
    if parallel != ParallelConfig() or on_failure != "fail":
        raise ConfigError(
            "the layout or on_failure is given beside an open executor, which has its own: "
            "set parallel= and on_failure= of the ExecutorConfig that it is opened with"
        )
    return cast("Executor", executor)


def _agreed(name: str, configured: Any, given: Any, default: Any) -> Any:
    """A setting that both the engine and its ``ExecutorConfig`` have: whichever of the two says something."""
    if default not in (configured, given) and configured != given:
        raise ConfigError(
            f"ExecutorConfig.{name} is {configured!r}, and the engine is given {given!r} beside it: leave one of them out"
        )
    return given if configured == default else configured


def _silent(phase: str, done: float, total: float) -> None:
    """Nobody wants to know."""
