"""How the ranks of a launcher find each other before they have lines: by a key in a store of torch's.

Under torchrun its agent keeps the store; where the launcher has none, rank 0 makes it. A trainer
that has initialised ``torch.distributed`` has one already, and that is taken.

Every operation here is a quick one: whoever waits for a value looks again, ever more rarely,
yet it loses no more by that than a fifth of what it has waited: a start may have little time.
A wait within the store would hold the connection, which others of this process may share, and
could not be cancelled.

Source: torch 2.13, ``distributed/rendezvous.py``, ``_create_c10d_store`` (one server for all of
a process), and ``distributed/distributed_c10d.py``, ``_get_default_store``.
"""

from __future__ import annotations

import abc
import asyncio
import importlib.util
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, Generic, TypeVar

import tenacity

from aexec.errors import ConfigError, MissingExtra

__all__ = ("PAUSE", "LauncherStore", "TorchStore", "TrainerStore", "off_loop")

_PREFIX: Final = "aexec"
_OPERATION: Final = timedelta(seconds=5)  # for one of them; the thread that does it is left behind at worst so long
PAUSE = tenacity.wait_exponential(multiplier=0.01, exp_base=1.2, max=0.25)  # seconds: a fifth of the time waited so far

T = TypeVar("T")


async def off_loop(act: Callable[[], T], name: str, unwanted: Callable[[T], object] | None = None) -> T:
    """Let a thread of its own do it, which keeps neither a cancelled caller nor the interpreter's end waiting.

    Args:
        act: What is done.
        name: Of the thread.
        unwanted: Gets what it gave when nobody waits for that any longer.
    """
    errand = _Errand(act, unwanted)
    threading.Thread(target=errand.run, name=f"aexec-{name}", daemon=True).start()
    return await errand.result()


class _Errand(Generic[T]):
    """What a thread does for a caller on a loop."""

    def __init__(self, act: Callable[[], T], unwanted: Callable[[T], object] | None) -> None:
        self._act, self._unwanted = act, unwanted
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[tuple[T]] = self._loop.create_future()

    def __repr__(self) -> str:
        return f"<_Errand: {self._done!r}>"

    def run(self) -> None:
        """On the thread."""
        try:
            value = self._act()
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
            self._post(self._fail, error)
        else:
            if not self._post(self._give, value):
                self._drop(value)

    async def result(self) -> T:
        """On the loop."""
        try:
            return (await self._done)[0]
        except asyncio.CancelledError:
            if self._done.done() and not self._done.cancelled() and self._done.exception() is None:
                self._drop(self._done.result()[0])  # it came in the very turn in which the caller was cancelled
            raise

    def _post(self, what: Callable[[Any], None], value: Any) -> bool:
        try:
            self._loop.call_soon_threadsafe(what, value)
        except RuntimeError:  # the loop is closed: nobody waits any longer
            return False
        return True

    def _give(self, value: T) -> None:
        if self._done.done():
            self._drop(value)
        else:
            self._done.set_result((value,))

    def _fail(self, error: BaseException) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    def _drop(self, value: T) -> None:
        if self._unwanted is not None:
            self._unwanted(value)


class TorchStore(abc.ABC):
    """A store of ``torch.distributed``, off the loop.

    Attributes:
        problem: Why it could not be reached so far, for people; empty: it could, or nobody has tried.
    """

    def __init__(self) -> None:
        self._store: Any = None
        self.problem = ""

    async def tell(self, key: str, value: bytes, timeout: float) -> None:
        """Give a value to all ranks; one that was there before is replaced.

        Raises:
            TimeoutError: The store could not be reached in time.
        """
        async with asyncio.timeout(timeout):
            store = await self._opened()
            await off_loop(lambda: store.set(key, value), "store")

    async def learn(self, key: str, timeout: float) -> bytes:
        """The value that is there, or comes to be.

        Raises:
            TimeoutError: There is none in time.
        """
        async with asyncio.timeout(timeout):
            store = await self._opened()

            def look() -> bytes | None:
                return bytes(store.get(key)) if store.check([key]) else None

            nothing = tenacity.retry_if_result(lambda found: found is None)
            found: bytes | None = await tenacity.AsyncRetrying(retry=nothing, wait=PAUSE)(off_loop, look, "store")
            assert found is not None
            return found

    def close(self) -> None:
        """Let go of it."""
        self._store = None

    @abc.abstractmethod
    async def _open(self) -> Any:
        """Reach it."""

    async def _opened(self) -> Any:
        if self._store is None:
            self._store = await self._open()
        return self._store


class LauncherStore(TorchStore):
    """torch's ``TCPStore`` at ``MASTER_ADDR:MASTER_PORT``: the agent's under torchrun, else rank 0's own.

    Args:
        host: ``MASTER_ADDR``.
        port: ``MASTER_PORT``.
        rank: This process, counted over all replicas.
        world_size: All processes.
        serve: Rank 0 has to make it, for the launcher has none (SLURM; ``TORCHELASTIC_USE_AGENT_STORE`` unset).
        attempt: The launcher's restart count (``TORCHELASTIC_RESTART_COUNT``).
    """

    def __init__(self, host: str, port: int, *, rank: int, world_size: int, serve: bool, attempt: int = 0) -> None:
        super().__init__()
        self.host, self.port = host, port
        self._serves = serve and rank == 0
        self._scope = f"{_PREFIX}/{world_size}/{attempt}"

    def __repr__(self) -> str:
        state = "not reached yet" if self._store is None else "open"
        return f"<LauncherStore {self.host}:{self.port}, {self._scope}: {state}>"

    async def _open(self) -> Any:
        if importlib.util.find_spec("torch") is None:  # else only rank 0 would say so, and the others wait for it
            raise MissingExtra("backend 'external_launcher'", "models", "torch")
        if not self._serves:
            await self._answers()
        return await off_loop(self._connect, "store")

    async def _answers(self) -> None:
        """Wait until somebody listens there: torch tries that as well, and writes to stderr whenever nobody does."""
        refused = tenacity.retry_if_exception_type(OSError)
        async for attempt in tenacity.AsyncRetrying(retry=refused, wait=PAUSE, before_sleep=self._note):
            with attempt:
                _, writer = await asyncio.open_connection(self.host, self.port)
                writer.close()
        self.problem = ""

    def _note(self, state: tenacity.RetryCallState) -> None:
        error = state.outcome and state.outcome.exception()
        self.problem = f"the store at {self.host}:{self.port} (MASTER_ADDR, MASTER_PORT) does not answer: {error}"

    def _connect(self) -> Any:
        from torch import distributed

        torch: Any = distributed
        try:
            store = torch.TCPStore(
                self.host,
                self.port,
                is_master=self._serves,
                timeout=_OPERATION,
                wait_for_workers=False,
                multi_tenant=True,  # whoever else of this process wants a store there gets this one
            )
        except RuntimeError as error:
            what = "be made" if self._serves else "be reached"
            raise ConfigError(
                f"the store at {self.host}:{self.port} (MASTER_ADDR, MASTER_PORT) cannot {what}: "
                f"{str(error).partition(chr(10))[0]}"
            ) from error
        return torch.PrefixStore(self._scope, store)


class TrainerStore(TorchStore):
    """The store of the ``torch.distributed`` world that the trainer has initialised."""

    def __repr__(self) -> str:
        return "<TrainerStore: that of torch.distributed>"

    async def _open(self) -> Any:
        from torch import distributed

        torch: Any = distributed
        find: Callable[[], Any] | None = getattr(torch.distributed_c10d, "_get_default_store", None)
        if find is None:
            raise ConfigError(
                "this version of torch does not say which store its world has: start the ranks with torchrun, and "
                "let the executor be opened before torch.distributed is initialised; or take torch 2.13"
            )
        return torch.PrefixStore(_PREFIX, find())
