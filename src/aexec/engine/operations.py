"""What may be done with an open engine beside generating: pause it, drain it, put it to sleep, give it new weights.

While the model is not whole no step is launched. Requests wait meanwhile, those that have begun
too: they keep their tokens, and compute them again when the KV cache was lost, so that each
goes on as if it had begun on the model as it is now.

Workers that are lost are rebuilt with the model's own weights, awake. An operation that they were
lost in has failed and is not repeated; its error says what they are like after.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from anyio import move_on_after, to_thread

from aexec.engine.calls import Drain, HaveWeights, Hold, Release, ResetPrefixCache, TakeRequests
from aexec.engine.events import EngineEvent
from aexec.engine.frontend import Frontend
from aexec.engine.replicated.calls import EndTurn, TakeTurn
from aexec.errors import AexecError, CallTimeout, ConfigError, ModelNotReady, UnknownMethod, note
from aexec.executor.base import Executor
from aexec.executor.lifecycle import ExecutorState
from aexec.messages.operations import WEIGHT_METHODS, NamedTensors, PauseMode, WeightsReport, pair_of, pairs_of
from aexec.observe.hub import EventStream

__all__ = ("CHUNK_BYTES", "EngineOperations")

#: Of weights that travel in one call: large enough to be quick, small enough to have twice.
CHUNK_BYTES = 256 * 2**20

_PAUSE, _SLEEP, _UPDATE = "pause", "sleep", "new weights"
_NEW_WEIGHTS = (*WEIGHT_METHODS, "finish_weight_update")
_FROM_OWN_FILES = ("load_model", "load_weights", "reload_weights")  # unless they are given others
_MODES = ("abort", "finish", "keep")
_KEYS = itertools.count(1)  # of holds
_END_SECONDS = 10.0  # in which an operation that was cancelled leaves the engine as it has to be


class EngineOperations(abc.ABC):
    """The operations of ``AsyncLLM``; all of them need it to be open."""

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        ranks: Sequence[int] | None = None,
        reply_rank: int | None = None,
    ) -> list[Any]:
        """Call a worker method on many ranks; see ``Executor.collective_rpc``.

        ``load_weights``, ``update_weights`` and their like are known by name: no step runs meanwhile, and
        requests go on with the new weights. After any other method that changes the model, call
        :meth:`reset_prefix_cache` before requests begin.
        """
        executor = self._opened().executor
        name = method if isinstance(method, str) else getattr(method, "__qualname__", type(method).__name__)
        async with self._in_turn(f"call of {name}"):
            if method not in _NEW_WEIGHTS:
                return await executor.collective_rpc(method, args, kwargs, timeout, ranks, reply_rank)
            async with self._held(_UPDATE):
                generation = executor.generation
                replies = await executor.collective_rpc(method, args, kwargs, timeout, ranks, reply_rank)
                await self._have_weights(generation, given=method not in _FROM_OWN_FILES or bool(args or kwargs))
            await self._release_if_ready()
        return replies

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Launch no more steps; returns when none is in flight.

        Requests may come meanwhile, and wait.

        Args:
            mode: ``keep``: those that run stop between two tokens. ``finish``: those that run
                go on to their end first. ``abort``: all end with the finish reason ``abort``.

        Raises:
            ConfigError: There is no such mode.
        """
        if mode not in _MODES:
            raise ConfigError(f"mode of pause is {mode!r}: expected one of {', '.join(_MODES)}")
        await self._hold(_PAUSE, mode)

    async def resume(self) -> None:
        """Go on after :meth:`pause`, and take requests again after :meth:`drain`; nothing happens otherwise."""
        await self._opened().driver.ask(TakeRequests(), timeout=None)
        await self._release(_PAUSE)

    async def reset_prefix_cache(self) -> bool:
        """Let no request use KV that is stored now, as after a change to the model that aexec does not know of.

        Requests that run go on with theirs. New weights, sleep and lost workers do this by themselves.

        Returns:
            False: the engine has no prefix cache.
        """
        return await self._opened().driver.ask(ResetPrefixCache(), timeout=None)

    async def drain(self, timeout: float | None = None) -> None:
        """Take no new requests; returns when all that were taken have ended.

        Those that come meanwhile end with ``EngineDraining``. Close it then, or :meth:`resume`.

        Args:
            timeout: Seconds; None: no limit.

        Raises:
            CallTimeout: Requests run still; they go on, and nothing new is taken. Where its ``started`` is
                False, the time was up before the drain had begun.
            ConfigError: ``timeout`` is no number of seconds.
        """
        if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"timeout of drain is {timeout!r}: expected seconds, or None for no limit")
        frontend = self._opened()
        try:
            await frontend.driver.ask(Drain(), timeout=timeout)
        except CallTimeout:
            found = await frontend.statistics()  # on a busy machine the time may be up before the drain has begun
            error = CallTimeout("drain", timeout or 0.0, started=found.is_draining)
            so = "nothing new is taken until resume()" if found.is_draining else "new ones are taken still"
            raise note(error, f"{found.num_streams} request(s) run still; {so}") from None

    def events(self) -> EventStream[EngineEvent]:
        """What happens to the engine from now on, until it is closed; see ``engine.events``."""
        return self._opened().events.listen()

    async def sleep(self, level: int = 1, timeout: float | None = None) -> list[Any]:
        """Give the model's memory back; requests wait until it is awake.

        Args:
            level: 1: the KV cache goes, and the weights move to host memory. 2: the weights
                are discarded, and have to come again after :meth:`wake_up`.
            timeout: Seconds; None: no limit.

        Returns:
            A ``SleepReport`` of each rank.

        Raises:
            UnknownMethod: The worker class cannot sleep.
            ConfigError: There is no such level.
        """
        executor = self._opened().executor
        async with self._in_turn("sleep"), self._awake_or_held(executor, _AWAKE):
            await self._hold(_SLEEP)
            return await executor.sleep(level, timeout)

    async def wake_up(self, tags: Collection[str] | None = None, timeout: float | None = None) -> list[Any]:
        """Bring back what sleeps; requests go on once all of it is there.

        Args:
            tags: ``weights`` and ``kv_cache``, or one of them; None: both.
            timeout: Seconds; None: no limit.

        Returns:
            A ``WakeReport`` of each rank.
        """
        tags = [tags] if isinstance(tags, str) else tags
        executor = self._opened().executor
        async with self._in_turn("wake-up"), self._awake_or_held(executor, _AWAKE):
            reports = await executor.wake_up(tags, timeout)
            await self._release_if_ready()
        return reports

    async def update_weights(
        self, weights: NamedTensors, *, partial: bool = False, chunk_bytes: int = CHUNK_BYTES
    ) -> WeightsReport:
        """Put new weights into the running model, on all ranks.

        Requests that run stop between two tokens and go on with the new weights.

        Args:
            weights: Full tensors by the names of the ``transformers`` model's ``state_dict()``:
                a mapping or pairs, also from an iterator, which is run in a thread and read
                in chunks, so that a whole second copy never has to be in memory. Those that a
                trainer of the same processes has spread (``DTensor``) are put together one by one.
            partial: Leave weights that do not come as they are; not after sleep level 2.
            chunk_bytes: Of tensors in one call.

        Returns:
            All names, over all ranks.

        Raises:
            WeightsMismatch: Names or shapes are wrong, or something is missing. Unless a note
                says that the weights are what they were, they are mixed, and requests end with
                ``ModelNotReady`` until an update or :meth:`load_weights` succeeds.
            ModelNotReady: The weights are asleep.
            WorkerDied: A rank ended meanwhile: nothing is left of the update. Workers that are
                rebuilt have the weights of the model's files.
        """
        executor = self._opened().executor
        async with self._in_turn(_UPDATE), self._awake_or_held(executor), self._held(_UPDATE):
            generation, has_begun = executor.generation, False
            try:
                await executor.collective_rpc("start_weight_update")
                has_begun = True
                async for chunk in _chunks(weights, chunk_bytes):
                    await executor.collective_rpc("update_weights", (chunk,))
                reports = await executor.collective_rpc("finish_weight_update", (), {"partial": partial})
                await self._have_weights(generation, given=True)
            except BaseException as error:
                with move_on_after(_END_SECONDS, shield=True):
                    await self._give_up(executor, generation, error, has_begun=has_begun)
                raise
            await self._release_if_ready()
        return _merged(reports)

    async def load_weights(self, path: str | None = None) -> WeightsReport:
        """Load the weights from files again, on all ranks, in place of those that are there.

        Args:
            path: A directory with a model of the same shapes; None: the model's own files.

        Raises:
            ConfigError: It holds another model; nothing was changed.
            ModelNotReady: The weights are asleep.
        """
        executor = self._opened().executor
        async with self._in_turn("load weights"), self._awake_or_held(executor), self._held(_UPDATE):
            generation = executor.generation
            try:
                reports = await executor.collective_rpc("load_weights", (path,))
                await self._have_weights(generation, given=path is not None)
            except BaseException as error:
                if _is_lost(executor, generation):
                    note(error, _FROM_FILES)
                elif path is not None and not isinstance(error, AexecError):
                    with move_on_after(_END_SECONDS, shield=True):  # the ranks load them all the same
                        await self._have_weights(generation, given=True)
                raise
            await self._release_if_ready()
        return _merged(reports)

    @contextlib.asynccontextmanager
    async def _in_turn(self, what: str) -> AsyncGenerator[None]:
        """What calls the executor beside the steps; where each rank has an engine, in the same order on all of them."""
        frontend = self._opened()
        if not frontend.is_replicated:
            yield
            return
        key = next(_KEYS)
        try:
            await frontend.driver.ask(TakeTurn(what=what, key=key), timeout=None)
            yield
        finally:
            with move_on_after(_END_SECONDS, shield=True), contextlib.suppress(AexecError):
                await frontend.driver.ask(EndTurn(key=key), timeout=None)

    # ------------------------------------------------------------ holds

    @abc.abstractmethod
    def _opened(self) -> Frontend:
        """The open engine."""

    async def _hold(self, reason: str, mode: PauseMode = "keep") -> int:
        """Launch no step until the release; cancelled, it leaves nothing behind."""
        driver, key = self._opened().driver, next(_KEYS)
        try:
            await driver.ask(Hold(reason=reason, mode=mode, key=key), timeout=None)
        except BaseException:  # it may have been answered in the same turn
            with contextlib.suppress(AexecError):
                await self._release(reason, key=key)
            raise
        return key

    async def _release(self, reason: str, *, key: int | None = None, recompute: bool = False) -> None:
        """End a hold, even if the caller is cancelled: without it all requests would wait for ever."""
        driver = self._opened().driver
        with move_on_after(_END_SECONDS, shield=True):
            await driver.ask(Release(reason=reason, key=key, recompute=recompute), timeout=None)

    async def _have_weights(self, generation: int, *, given: bool) -> None:
        await self._opened().driver.ask(HaveWeights(given, generation), timeout=None)

    async def _give_up(self, executor: Executor, generation: int, error: BaseException, *, has_begun: bool) -> None:
        """Say in the error what an update that failed, or was cancelled, leaves behind."""
        if _is_lost(executor, generation):
            note(error, _FROM_FILES)
            return
        if isinstance(error, ModelNotReady) and not has_begun:
            return  # refused on all ranks; if an update is under way it is another one
        with contextlib.suppress(AexecError):
            if all(await executor.collective_rpc("cancel_weight_update")) or not has_begun:
                note(error, _UNTOUCHED)
            else:
                note(error, _MIXED)
                await self._have_weights(generation, given=True)

    async def _release_if_ready(self) -> None:
        """After a sleep: once all ranks have all of the model."""
        try:
            reports = await self._opened().executor.collective_rpc("residency")
        except UnknownMethod:
            reports = []  # workers without it cannot sleep
        if all(report.is_ready for report in reports):
            await self._release(_SLEEP, recompute=True)

    @contextlib.asynccontextmanager
    async def _awake_or_held(self, executor: Executor, advice: str = "") -> AsyncGenerator[None]:
        """Whatever fails in it, or is cancelled: requests wait for a model that sleeps, and for no other."""
        generation = executor.generation
        try:
            yield
        except BaseException as error:
            with move_on_after(_END_SECONDS, shield=True), contextlib.suppress(AexecError):
                with contextlib.suppress(AexecError):
                    if not _is_lost(executor, generation):
                        await self._release_if_ready()
                if _is_lost(executor, generation):
                    if advice:
                        note(error, advice)
                    await self._release(_SLEEP, recompute=True)
            raise

    @contextlib.asynccontextmanager
    async def _held(self, reason: str) -> AsyncGenerator[None]:
        key = await self._hold(reason)
        try:
            yield
        finally:
            with contextlib.suppress(AexecError):  # the engine is closed
                await self._release(reason, key=key, recompute=True)


def _is_lost(executor: Executor, generation: int) -> bool:
    """The workers that were called are gone."""
    return executor.state is not ExecutorState.READY or executor.generation != generation


_AWAKE = "the workers are lost; those that are rebuilt are awake, with the weights of the model's files"
_FROM_FILES = (
    "the workers are lost, and the update with them; those that are rebuilt have the weights of the model's files: "
    "call update_weights() with all of them once more, or load_weights()"
)
_UNTOUCHED = "the weights are what they were"
_MIXED = "the weights are half updated and nothing runs: call update_weights() with all of them, or load_weights()"


async def _chunks(weights: NamedTensors, limit: int) -> AsyncGenerator[list[tuple[str, Any]]]:
    pairs = iter(pairs_of(weights))
    while chunk := await to_thread.run_sync(_next_chunk, pairs, limit):
        yield chunk


def _next_chunk(pairs: Iterator[tuple[str, Any]], limit: int) -> list[tuple[str, Any]]:
    chunk: list[tuple[str, Any]] = []
    size = 0
    while size < limit and (pair := next(pairs, None)) is not None:
        name, tensor = pair_of(pair)
        if hasattr(tensor, "full_tensor"):  # spread over a trainer's ranks, all of which come to it in this order
            tensor = tensor.full_tensor()
        chunk.append((name, tensor))
        size += int(getattr(tensor, "nbytes", 0))
    return chunk


def _merged(reports: Sequence[WeightsReport]) -> WeightsReport:
    names = dict.fromkeys(name for report in reports for name in report.applied)
    return WeightsReport(version=max(report.version for report in reports), applied=tuple(names))
