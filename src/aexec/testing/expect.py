"""Small words for contract checks: no test framework needed, and each failure says its rule."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, Protocol, TypeVar

from aexec.executor.base import Executor
from aexec.messages.step import StepId

__all__ = (
    "PATIENCE",
    "SOON",
    "Caught",
    "MakeExecutor",
    "all_are_in",
    "all_have_come",
    "equal",
    "eventually",
    "holds",
    "let_go",
    "log_of",
    "new_steps",
    "raising",
    "within",
)

SOON = 1.0  # seconds in which a caller learns of an error or of a death
PATIENCE = 30.0  # seconds in which anything at all has to end

E = TypeVar("E", bound=BaseException)
T = TypeVar("T")


class MakeExecutor(Protocol):
    """Opens an executor for a check."""

    def __call__(self, worker_cls: type[Any], /, **settings: Any) -> AbstractAsyncContextManager[Executor]:
        """An executor of ``worker_cls``; ``settings`` are fields of ``ExecutorConfig``."""
        ...


class Caught(Generic[E]):
    """What :func:`raising` has caught."""

    error: E

    @property
    def notes(self) -> str:
        """The notes of the error, one below the other."""
        return "\n".join(getattr(self.error, "__notes__", ()))


def holds(fact: object, rule: str) -> None:
    """Fail with ``rule`` unless ``fact`` is true."""
    if not fact:
        raise AssertionError(rule)


def equal(found: object, wanted: object, rule: str) -> None:
    """Fail with ``rule`` unless the two are equal."""
    if found != wanted:
        raise AssertionError(f"{rule}: found {found!r}, expected {wanted!r}")


@contextlib.contextmanager
def raising(kind: type[E], rule: str) -> Generator[Caught[E]]:
    """Fail with ``rule`` unless the block raises a ``kind``."""
    caught: Caught[E] = Caught()
    try:
        yield caught
    except kind as error:
        caught.error = error
    except Exception as error:
        raise AssertionError(f"{rule}: raised {error!r}, expected {kind.__name__}") from error
    else:
        raise AssertionError(f"{rule}: nothing was raised, expected {kind.__name__}")


@contextlib.contextmanager
def within(seconds: float, rule: str) -> Generator[None]:
    """Fail with ``rule`` if the block takes longer."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    if took > seconds:
        raise AssertionError(f"{rule}: it took {took:.3g} s, at most {seconds:.3g} s are allowed")


async def eventually(fact: Callable[[], Awaitable[bool]], rule: str) -> None:
    """Fail with ``rule`` unless ``fact`` becomes true in time."""
    give_up = time.monotonic() + PATIENCE
    while not await fact():
        if time.monotonic() > give_up:
            raise AssertionError(rule)
        await asyncio.sleep(0.005)


async def all_are_in(executor: Executor, phase: str) -> None:
    """Wait until that is what every rank does: from then on a machine that stands still changes nothing."""

    async def they_are() -> bool:
        report = await executor.check_health()
        return {rank.phase for rank in report.ranks} == {phase}

    await eventually(they_are, f"all ranks are in {phase}")


async def all_have_come(executor: Executor) -> None:
    """Wait for whoever runs the same check beside this one: what was seen of their workers may change only then."""
    await executor.collective_rpc("async_echo", ("all are here",), timeout=PATIENCE)


async def let_go(executor: Executor, rank: int | None = None) -> None:
    """End the ``hold`` of one rank or of all, once whoever runs the same check beside this one has seen it."""
    await all_have_come(executor)
    await executor.collective_rpc("release", ranks=None if rank is None else [rank], timeout=PATIENCE)


async def log_of(executor: Executor, rank: int = 0) -> Sequence[Any]:
    """What a probe worker has written down, without its hooks."""
    (log,) = await executor.collective_rpc("read_log", ranks=[rank])
    return [entry for entry in log if not (isinstance(entry, str) and entry.split()[0] in _HOOKS)]


def new_steps(executor: Executor, number: int) -> list[StepId]:
    """So many step ids that it has not seen, in order: it may be one that other checks have used before."""
    last = _last_steps.get(executor, 0)
    _last_steps[executor] = last + number
    return [StepId(last + 1 + place) for place in range(number)]


_last_steps: weakref.WeakKeyDictionary[Executor, int] = weakref.WeakKeyDictionary()

_HOOKS = (
    "__init__",
    "init_device",
    "load_model",
    "determine_available_memory",
    "initialize_cache",
    "compile_or_warm_up",
)
