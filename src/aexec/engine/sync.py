"""``LLM``: the engine for code without ``await``, also where an event loop runs already.

The engine lives on an event loop of its own, in a thread of its own: nothing is patched,
and a notebook's loop is left alone. Calls wait in the caller's thread, where Ctrl-C
reaches them; it cancels what was asked for and the engine stays usable.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent import futures
from os import PathLike
from typing import Any, ClassVar, Self, TypeVar, cast

from aexec.actor import ActorStatistics
from aexec.engine.completion import Completion
from aexec.engine.llm import AsyncLLM, Prompt
from aexec.engine.overlap import AsyncScheduling
from aexec.engine.statistics import EngineStatistics
from aexec.engine.text import Tokenizer
from aexec.errors import ExecutorClosed, InvalidRequest
from aexec.messages.lifecycle import ModelInfo
from aexec.messages.operations import NamedTensors, PauseMode, WeightsReport
from aexec.messages.request import RequestOptions, SamplingParams
from aexec.messages.structured import short

__all__ = ("LLM",)

R = TypeVar("R")

_CANCEL_SECONDS = 10.0  # that an interrupted call has to end
_CLOSED_MEANWHILE = "another thread has closed it: open() it again, or keep it open for as long as it is called"


class LLM:
    """A blocking :class:`AsyncLLM`: ``with LLM("smollm2") as llm: llm.generate("Hello")``.

    Its methods may be called from several threads at once, as to :meth:`abort` what another
    one waits for. Chunk by chunk and event by event there is ``AsyncLLM``: both are for a task
    beside, which a program that blocks has not; what events tell is in :meth:`statistics`, too.

    Args:
        model: As for ``AsyncLLM``.
        settings: As for ``AsyncLLM``. ``progress`` is called on the engine's thread.
    """

    engine_class: ClassVar[type[AsyncLLM]] = AsyncLLM

    def __init__(self, model: str | PathLike[str], **settings: Any) -> None:
        self._llm = self.engine_class(model, **settings)
        self._thread: _LoopThread | None = None
        self._closer: weakref.finalize[Any, Any] | None = None
        self._opening = threading.Lock()

    def open(self) -> Self:
        """Start the engine; raises what ``AsyncLLM.open`` raises."""
        with self._opening:  # another thread's call waits, and finds it open
            if self._thread is None:
                self._thread = self._start()
        return self

    def close(self) -> None:
        """End the engine and its thread; may be called twice."""
        self._thread = None
        if self._closer is not None:
            self._closer()

    def __enter__(self) -> Self:
        """Open it."""
        return self.open()

    def __exit__(self, *exc_info: object) -> None:
        """Close it."""
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
    ) -> list[Completion]:
        """Run prompts at once, and wait for all of them.

        Args:
            prompts: One prompt (text, or token ids), or several.
            sampling: For all of them, or one for each.
            priority: Of all of them; see ``AsyncLLM.generate``.
            timeout: Seconds that each may take once it is sent, which is when there is room for it to wait.
            cache_salt: They share the prefix cache with requests of the same salt only.

        Returns:
            One completion for each prompt, in their order.

        Raises:
            ExecutorClosed: The engine is not open.
            InvalidRequest: There are more or fewer sampling parameters than prompts, or an argument is something else.
            AexecError: What ended the first request that failed; the others are aborted.
        """
        several = _as_several(prompts)
        each = _one_for_each(sampling, len(several))
        options = RequestOptions(priority=priority, timeout=timeout, cache_salt=cache_salt)
        return self._run(self._complete_all(list(zip(several, each, strict=True)), options))

    def complete(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
    ) -> Completion:
        """Run one request to its end, under an id of your own if need be; see ``AsyncLLM.generate``."""
        options = RequestOptions(priority=priority, timeout=timeout, cache_salt=cache_salt)
        return self._run(self._complete(prompt, sampling, options, request_id))

    def abort(self, request_id: str) -> bool:
        """End a request by its id, from another thread; see ``AsyncLLM.abort``."""
        return self._run(self._llm.abort(request_id))

    def pause(self, mode: PauseMode = "keep") -> None:
        """Launch no more steps; returns when none is in flight; see ``AsyncLLM.pause``."""
        self._run(self._llm.pause(mode))

    def resume(self) -> None:
        """Go on after :meth:`pause`, and take requests again after :meth:`drain`."""
        self._run(self._llm.resume())

    def drain(self, timeout: float | None = None) -> None:
        """Take no new requests; returns when all that were taken have ended; see ``AsyncLLM.drain``."""
        self._run(self._llm.drain(timeout))

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        ranks: Sequence[int] | None = None,
        reply_rank: int | None = None,
    ) -> list[Any]:
        """Call a worker method on many ranks; see ``Executor.collective_rpc``."""
        return self._run(self._llm.collective_rpc(method, args, kwargs, timeout, ranks, reply_rank))

    def reset_prefix_cache(self) -> bool:
        """Let no request use KV that is stored now; see ``AsyncLLM.reset_prefix_cache``."""
        return self._run(self._llm.reset_prefix_cache())

    def sleep(self, level: int = 1, timeout: float | None = None) -> list[Any]:
        """Give the model's memory back; see ``AsyncLLM.sleep``."""
        return self._run(self._llm.sleep(level, timeout))

    def wake_up(self, tags: Collection[str] | None = None, timeout: float | None = None) -> list[Any]:
        """Bring back what sleeps; see ``AsyncLLM.wake_up``."""
        return self._run(self._llm.wake_up(tags, timeout))

    def update_weights(self, weights: NamedTensors, *, partial: bool = False) -> WeightsReport:
        """Put new weights into the running model; see ``AsyncLLM.update_weights``."""
        return self._run(self._llm.update_weights(weights, partial=partial))

    def load_weights(self, path: str | None = None) -> WeightsReport:
        """Load the weights from files again; see ``AsyncLLM.load_weights``."""
        return self._run(self._llm.load_weights(path))

    def chat_prompt(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The prompt for a conversation, by the model's own template."""
        return self._llm.chat_prompt(messages)

    @property
    def is_open(self) -> bool:
        """True between opening and closing."""
        return self._thread is not None

    @property
    def async_scheduling(self) -> AsyncScheduling:
        """Whether a step is launched before the tokens of the last one are back, and why."""
        return self._llm.async_scheduling

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; see ``AsyncLLM.tokenizer``."""
        return self._llm.tokenizer

    @property
    def model_info(self) -> ModelInfo:
        """Facts about the loaded model."""
        return self._llm.model_info

    def statistics(self) -> EngineStatistics:
        """Requests, steps, blocks and crashes in numbers."""
        return self._run(self._llm.statistics())

    def driver_statistics(self) -> ActorStatistics:
        """How busy the engine itself is; see ``AsyncLLM.driver_statistics``."""
        return self._llm.driver_statistics()

    def __repr__(self) -> str:
        """As in ``<LLM 'smollm2': open>``."""
        return f"<{type(self).__name__} {self._llm.model.model!r}: {'closed' if self._thread is None else 'open'}>"

    def _start(self) -> _LoopThread:
        self._room, self._door = asyncio.Semaphore(self._llm.scheduling.max_num_waiting), asyncio.Lock()
        thread = _LoopThread(f"aexec-{self._llm.model.model}")
        try:
            thread.run(self._llm.open())
        except BaseException:
            thread.stop()
            raise
        # Runs once: by close(), or for programs that forget it, before the interpreter ends.
        self._closer = weakref.finalize(self, _close, self._llm, thread)
        return thread

    def _run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        thread = self._thread
        if thread is None:
            coroutine.close()
            raise ExecutorClosed(f"{self!r}: use `with` around it, or open()")
        return thread.run(coroutine)

    async def _complete_all(
        self, requests: list[tuple[Prompt, SamplingParams | None]], options: RequestOptions
    ) -> list[Completion]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._complete(*request, options)) for request in requests]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _complete(
        self, prompt: Prompt, sampling: SamplingParams | None, options: RequestOptions, request_id: str | None = None
    ) -> Completion:
        async with self._room_for(sampling):
            return await self._llm.complete(
                prompt,
                sampling,
                request_id=request_id,
                priority=options.priority,
                timeout=options.timeout,
                cache_salt=options.cache_salt,
            )

    @contextlib.asynccontextmanager
    async def _room_for(self, sampling: object) -> AsyncGenerator[None]:
        """Places in the engine's queue, so that it turns away none of a long list; what it refuses needs none."""
        num_samples = sampling.n if isinstance(sampling, SamplingParams) else 1
        num_places = num_samples if num_samples <= self._llm.scheduling.max_num_waiting else 0
        async with contextlib.AsyncExitStack() as places:
            async with self._door:  # one at a time, so that no two wait for each other's
                for _ in range(num_places):
                    await places.enter_async_context(self._room)
            yield


class _LoopThread:
    """A thread with an event loop, for as long as nobody stops it."""

    def __init__(self, name: str) -> None:
        self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
        self._door, self._is_stopped = threading.RLock(), False
        # A daemon, so that a program that forgot to close does not hang at its end before
        # the finalizer gets its turn.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run it on the loop and wait; an interrupt of the wait cancels it, and waits for its end.

        Raises:
            ExecutorClosed: Another thread has closed it, or this is a fork of the process that has the thread.
        """
        if self.is_lost:
            coroutine.close()
            raise ExecutorClosed(
                f"it was opened in process {self._pid}, and this is {os.getpid()}, a fork of it without its threads: "
                "make another LLM here"
            )
        ended = threading.Event()
        with self._door:  # nothing gets to a loop that has stopped: nobody would ever answer
            if self._is_stopped:
                coroutine.close()
                raise ExecutorClosed(_CLOSED_MEANWHILE)
            future = asyncio.run_coroutine_threadsafe(_told(coroutine, ended), self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            ended.wait(_CANCEL_SECONDS)
            raise
        except futures.CancelledError:
            if not self._is_stopped:
                raise
            coroutine.close()  # which may never have begun
            raise ExecutorClosed(_CLOSED_MEANWHILE) from None

    def stop(self) -> None:
        """End what still runs, then the loop and the thread."""
        with self._door:
            self._is_stopped = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    @property
    def is_lost(self) -> bool:
        """True in a fork of the process that has it: nobody would ever answer there."""
        return os.getpid() != self._pid

    @property
    def is_here(self) -> bool:
        """True in the thread itself."""
        return threading.current_thread() is self._thread

    def finish(self, last: Coroutine[Any, Any, None]) -> None:
        """Run ``last`` and stop, from within the thread."""
        self._last = self._loop.create_task(last)
        self._last.add_done_callback(lambda _: self._loop.stop())

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()


async def _told(coroutine: Coroutine[Any, Any, R], ended: threading.Event) -> R:
    try:
        return await coroutine
    finally:
        ended.set()


def _close(llm: AsyncLLM, thread: _LoopThread) -> None:
    if thread.is_lost:  # a fork ends, and the engine is not its own
        return
    if thread.is_here:  # a finalizer runs wherever the last reference went
        thread.finish(llm.aclose())
        return
    try:
        thread.run(llm.aclose())
    finally:
        thread.stop()


def _as_several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt, or from several."""
    if isinstance(prompts, str):
        return [prompts]
    if not hasattr(prompts, "__iter__"):
        raise InvalidRequest(f"prompts is {short(prompts)}: expected a prompt, as text or token ids, or a list of them")
    several = list(prompts)
    if several and not isinstance(several[0], str) and not hasattr(several[0], "__iter__"):
        return [cast("Sequence[int]", several)]
    return cast("list[Prompt]", several)


def _one_for_each(
    sampling: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams | None]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling] * num_prompts
    each = list(sampling) if isinstance(sampling, Sequence) else [cast("Any", sampling)]  # pyright: ignore[reportUnnecessaryIsInstance]
    wrong = [one for one in each if not isinstance(one, SamplingParams | None)]
    if wrong:
        raise InvalidRequest(
            f"sampling is or holds {short(wrong[0])}: expected SamplingParams(...) for all prompts, or a list with one "
            "for each"
        )
    if len(each) != num_prompts:
        raise InvalidRequest(
            f"the list of sampling parameters is {'shorter' if len(each) < num_prompts else 'longer'} than that of "
            f"prompts ({len(each)} and {num_prompts}): expected one for each, or SamplingParams(...) for all of them"
        )
    return each
