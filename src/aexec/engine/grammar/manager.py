"""The grammars of an engine: compiled off its loop, kept for the next request, and the bitmask of each step.

A compiled grammar is found in the cache or compiled in a process for it, which is killed when
it takes too long: that request fails, and nobody else notices. What passed there is loaded
here, on a thread. Requests that ask for the same grammar at once share one compilation, which
ends with the last of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread

from aexec.config import StructuredOutputConfig
from aexec.engine.grammar.base import Grammar, GrammarBackend, GrammarError, GrammarSpec, GrammarTooSlow, Vocabulary
from aexec.engine.grammar.compiler import Compiler, CompilerLost
from aexec.engine.grammar.filling import Filler, Wanted
from aexec.engine.grammar.following import RequestGrammar, end_bits
from aexec.engine.grammar.sharing import SharedWork
from aexec.engine.grammar.spec import check_size, grammar_spec
from aexec.engine.grammar.statistics import GrammarStatistics
from aexec.engine.masks import Masks
from aexec.engine.records import RequestUpdate
from aexec.engine.request import Request, RequestStatus
from aexec.engine.text import Tokenizer
from aexec.errors import AexecError, InvalidRequest, MissingExtra, QueueFull, RequestFailed
from aexec.messages.batch import GrammarOutput
from aexec.messages.structured import StructuredOutput

__all__ = ("BACKENDS", "GrammarManager")

#: By the name that ``StructuredOutput.backend`` gives: ``module:Class``, and what to install.
BACKENDS: dict[str, tuple[str, str]] = {
    "llguidance": ("aexec.engine.grammar.llguidance_backend:LLGuidanceBackend", "structured"),
    "xgrammar": ("aexec.engine.grammar.xgrammar_backend:XGrammarBackend", ""),
}

_Key = tuple[str, GrammarSpec]
_T = TypeVar("_T")
_MOST_THREADS = 16
_QUICK_SECONDS = 1.0  # most grammars take a thousandth of it


class GrammarManager:
    """Of one engine; on its loop.

    Args:
        config: Limits, and which library.
        tokenizer: The model's; None: it has none, and no grammar.
        vocab_size: Width of the logits.
        end_token_ids: The model's end tokens.
        find: The request of an id, while it lives.
        finish: Ends a request.
    """

    def __init__(
        self,
        config: StructuredOutputConfig,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        end_token_ids: tuple[int, ...],
        find: Callable[[str], Request | None],
        finish: Callable[[str, RequestStatus], object],
    ) -> None:
        self._config, self._tokenizer, self._find, self._finish = config, tokenizer, find, finish
        self._vocabulary = Vocabulary(vocab_size, end_token_ids)
        self._end_bits = end_bits(self._vocabulary)
        self._filler = Filler(self._vocabulary.num_words, config.mask_timeout, config.num_threads)
        self._read: asyncio.Task[Vocabulary] | None = None  # the vocabulary's text, once somebody needs it
        self._backends: dict[str, asyncio.Task[GrammarBackend]] = {}
        self._idle: dict[str, list[Compiler]] = {}
        self._compilers: list[Compiler] = []
        self._threads = CapacityLimiter(_MOST_THREADS)
        self._room = asyncio.Semaphore(config.num_compilers)
        self._slow_lane = asyncio.Semaphore(max(config.num_compilers - 1, 1))
        self._kept: OrderedDict[_Key, Grammar] = OrderedDict()
        self._under_way = SharedWork(self._make, self._keep)
        self._num_compiled = self._num_refused = self._num_hits = self._num_masks = self._num_rows = 0
        self._compile_seconds = self._mask_seconds = 0.0

    def __repr__(self) -> str:
        """As in ``<GrammarManager: 3 kept, 1 under way, <Filler: 0 late>>``."""
        return f"<GrammarManager: {len(self._kept)} kept, {len(self._under_way)} under way, {self._filler!r}>"

    def statistics(self) -> GrammarStatistics:
        """Grammars in numbers."""
        return GrammarStatistics(
            self._num_compiled,
            self._num_refused,
            len(self._kept),
            self._num_hits,
            self._compile_seconds,
            self._num_masks,
            self._num_rows,
            self._mask_seconds,
            len(self._compilers),
            self._filler.num_late,
        )

    # ------------------------------------------------------------ from a user's wish to a grammar

    def check(self, structured: StructuredOutput) -> None:
        """Refuse at once what cannot be had, before the request is queued.

        Raises:
            InvalidRequest: There is no tokenizer or no such library, or the grammar is too large.
            MissingExtra: The library is not installed.
        """
        if self._tokenizer is None:
            raise InvalidRequest("structured output needs a tokenizer, and this model has none")
        _check_backend(structured.backend or self._config.backend)
        check_size(structured, self._config.max_bytes)

    async def preload(self) -> None:
        """Make the library of this engine ready, if it is installed: some let nothing else run meanwhile."""
        name = self._config.backend
        if self._tokenizer is None or not self._config.preload or name not in BACKENDS or find_spec(name) is None:
            return
        vocabulary = await self._vocabulary_text()
        if vocabulary.tokenizer_json is not None:
            await self._backend(name, vocabulary)

    async def compile(self, request: Request) -> RequestGrammar:
        """The grammar of a request.

        Raises:
            InvalidRequest: It does not compile; the text is the library's reason.
            QueueFull: Too many others are being compiled.
            RequestFailed: There is no process to compile it in.
        """
        structured = request.structured
        assert structured is not None
        self.check(structured)
        began = time.monotonic()
        try:
            spec = await self._in_thread(grammar_spec, structured, self._config.max_bytes)
            grammar = await self._get((structured.backend or self._config.backend, spec), request.request_id)
        except GrammarError as error:
            self._num_refused += 1
            raise InvalidRequest(f"the {structured.kind} of request {request.request_id} is refused: {error}") from None
        except CompilerLost as error:
            raise RequestFailed(f"no grammar could be compiled for request {request.request_id}: {error}") from None
        finally:
            self._compile_seconds += time.monotonic() - began
        may_not_end = bool(self._vocabulary.end_token_ids) and request.stop_token_ids.isdisjoint(
            self._vocabulary.end_token_ids
        )
        return RequestGrammar(grammar.fork(), self._end_bits if may_not_end else None)

    async def _get(self, key: _Key, request_id: str) -> Grammar:
        kept = self._kept.get(key)
        if kept is not None:
            self._num_hits += 1
            self._kept.move_to_end(key)
            return kept
        limit = self._config.max_num_compiling
        if key not in self._under_way and len(self._under_way) >= limit:
            raise QueueFull(
                request_id, limit, "grammars are being compiled", "StructuredOutputConfig.max_num_compiling"
            )
        return await self._under_way.get(key)

    def _keep(self, key: _Key, grammar: Grammar) -> None:
        self._num_compiled += 1
        self._kept[key] = grammar
        while len(self._kept) > self._config.cache_size:
            self._kept.popitem(last=False)

    async def _make(self, key: _Key) -> Grammar:
        name, spec = key
        vocabulary = await self._vocabulary_text()
        prepared = await self._prepare(name, vocabulary, spec)
        backend = await self._backend(name, vocabulary)
        return await self._in_thread(backend.load, prepared)

    async def _prepare(self, name: str, vocabulary: Vocabulary, spec: GrammarSpec) -> str:
        """First for a short time; a grammar that takes longer starts over in a line of its own, beside the quick ones."""
        limit = self._config.compile_timeout
        try:
            return await self._prepare_within(name, vocabulary, spec, min(limit, _QUICK_SECONDS))
        except GrammarTooSlow:
            if limit <= _QUICK_SECONDS:
                raise
        async with self._slow_lane:
            return await self._prepare_within(name, vocabulary, spec, limit)

    async def _prepare_within(self, name: str, vocabulary: Vocabulary, spec: GrammarSpec, seconds: float) -> str:
        async with self._room:
            compiler = self._take_compiler(name, vocabulary)
            try:
                return await self._in_thread(compiler.prepare, spec, seconds)
            except asyncio.CancelledError:  # and its thread is at work still
                await self._kill(compiler)
                raise
            finally:
                if compiler in self._compilers:
                    self._idle[name].append(compiler)

    def _take_compiler(self, name: str, vocabulary: Vocabulary) -> Compiler:
        idle = self._idle.setdefault(name, [])
        if idle:
            return idle.pop()
        compiler = Compiler(BACKENDS[name][0], vocabulary)
        self._compilers.append(compiler)
        return compiler

    async def _kill(self, compiler: Compiler) -> None:
        """Nobody waits any longer for what it compiles: the next grammar has a new one."""
        try:
            await self._in_thread(compiler.close)
        finally:
            self._compilers.remove(compiler)

    async def _vocabulary_text(self) -> Vocabulary:
        if self._read is None:
            self._read = asyncio.ensure_future(self._in_thread(self._read_vocabulary))
            self._read.add_done_callback(self._was_read)
        return await asyncio.shield(self._read)

    def _was_read(self, task: asyncio.Task[Vocabulary]) -> None:
        if _has_failed(task):  # the next one tries again
            self._read = None

    def _read_vocabulary(self) -> Vocabulary:
        assert self._tokenizer is not None
        known = self._vocabulary
        return Vocabulary(known.size, known.end_token_ids, self._tokenizer.to_json())

    async def _backend(self, name: str, vocabulary: Vocabulary) -> GrammarBackend:
        task = self._backends.get(name)
        if task is None:
            task = asyncio.ensure_future(self._in_thread(_open_backend, name, vocabulary))
            self._backends[name] = task
            task.add_done_callback(lambda done: self._was_opened(name, done))
        return await asyncio.shield(task)

    def _was_opened(self, name: str, task: asyncio.Task[GrammarBackend]) -> None:
        if _has_failed(task):
            del self._backends[name]

    # ------------------------------------------------------------ the bitmask of a step

    def constrained(self, sampled: Iterable[Request]) -> frozenset[str]:
        """Those of the requests that a step samples which have a grammar."""
        return frozenset(request.request_id for request in sampled if request.grammar is not None)

    def mask(self, request_ids: frozenset[str]) -> Coroutine[Any, Any, Masks]:
        """A new bitmask for these requests, as they are now; those that have ended by now are left out."""
        wanted: dict[Request, Wanted] = {}
        for request in filter(None, map(self._find, sorted(request_ids))):
            if request.grammar is not None:
                wanted[request] = Wanted(request.grammar, _output(request))
        return self._fill(wanted)

    async def _fill(self, wanted: dict[Request, Wanted]) -> Masks:
        began = time.monotonic()
        filled = await self._filler.fill(list(wanted.values()))
        names = [request.request_id for request in wanted]
        requests = list(wanted)
        failed = {requests[row]: _failure(names[row], reason) for row, reason in filled.failed.items()}
        self._num_masks += 1
        self._num_rows += len(names)
        self._mask_seconds += time.monotonic() - began
        return Masks(GrammarOutput(request_ids=names, bitmask=filled.bitmask), failed)

    def accept(self, updates: Iterable[RequestUpdate]) -> list[RequestUpdate]:
        """Learn the tokens that a step brought; a request whose text is whole ends here."""
        return [self._accept(update) if update.request.grammar is not None else update for update in updates]

    def _accept(self, update: RequestUpdate) -> RequestUpdate:
        request = update.request
        grammar = request.grammar
        if request.is_finished or grammar is None:
            request.grammar = None
            return update
        try:
            is_whole = grammar.advance(_output(request))
        except GrammarError as reason:
            self._finish(request.request_id, RequestStatus.FINISHED_FAILED)
            return RequestUpdate(request, [], error=f"its grammar cannot go on: {reason}")
        if is_whole:
            self._finish(request.request_id, RequestStatus.FINISHED_STOPPED)
            request.grammar = None
        return update

    def _in_thread(self, call: Callable[..., _T], *args: object) -> Coroutine[Any, Any, _T]:
        """Call something that blocks; a program that is short of threads has these all the same."""
        return to_thread.run_sync(call, *args, abandon_on_cancel=True, limiter=self._threads)

    # ------------------------------------------------------------ its end

    async def aclose(self) -> None:
        """Kill the processes, and wait for the threads that talk to them."""
        tasks: list[asyncio.Task[Any]] = [*self._backends.values(), *([self._read] if self._read else [])]
        for task in tasks:
            task.cancel()
        await self._under_way.aclose()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._in_thread(compiler.close) for compiler in self._compilers))
        self._kept.clear()


def _has_failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None


def _output(request: Request) -> list[int]:
    return request.token_ids[request.num_prompt_tokens :]


def _failure(request_id: str, reason: GrammarError) -> AexecError:
    return RequestFailed(f"request {request_id} failed: its grammar cannot go on: {reason}")


def _check_backend(name: str) -> None:
    if name not in BACKENDS:
        raise InvalidRequest(f"backend of structured output is {name!r}: expected one of {', '.join(BACKENDS)}")
    if find_spec(name) is None:
        extra = BACKENDS[name][1]
        if not extra:
            raise InvalidRequest(
                f"backend of structured output is {name!r}, and it is not installed: pip install {name} "
                "(which brings torch), or leave backend out"
            )
        raise MissingExtra("structured output", extra, name)


def _open_backend(name: str, vocabulary: Vocabulary) -> GrammarBackend:
    module, _, attribute = BACKENDS[name][0].partition(":")
    backend: GrammarBackend = getattr(import_module(module), attribute)(vocabulary)
    return backend
