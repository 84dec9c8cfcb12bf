"""The door to Ray: the only place that imports it, and how its calls are made from a loop.

Ray has no stubs that a strict checker accepts, and most of its calls block: importing it takes
a second, ``init`` five, ``shutdown`` two. :func:`off_loop` gives each such call a thread of its
own and a limit; :func:`answer` awaits what is on its way without any thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from aexec.errors import CallTimeout, MissingExtra

__all__ = (
    "actor_errors",
    "answer",
    "is_connected",
    "kill",
    "off_loop",
    "on_thread",
    "part",
    "ray",
    "system_errors",
    "task_error",
)

T = TypeVar("T")


def ray() -> Any:
    """The module; the first time that takes a second, so not on a loop.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingExtra("backend 'ray'", "ray", "ray") from error


def part(name: str) -> Any:
    """A module of Ray's own by its name, as in ``util.scheduling_strategies``."""
    ray()
    return importlib.import_module(f"ray.{name}")


def is_connected() -> bool:
    """True if this process is connected to a cluster, as in an actor or a task; Ray is not imported for that."""
    module = sys.modules.get("ray")
    return module is not None and bool(getattr(module, "is_initialized", bool)())


def actor_errors() -> tuple[type[Exception], ...]:
    """What Ray raises where an actor is gone, or cannot be reached."""
    return (ray().exceptions.RayActorError,)


def system_errors() -> tuple[type[Exception], ...]:
    """Whatever Ray itself raises, and not the code that it runs."""
    return (ray().exceptions.RayError,)


def task_error() -> type[Exception]:
    """What wraps an exception of the code that Ray runs; ``cause`` is the exception itself."""
    found: type[Exception] = ray().exceptions.RayTaskError
    return found


def kill(actors: Sequence[Any]) -> None:
    """End actors, in whatever state they are; those that have ended are no matter.

    Where somebody has disconnected this process they have ended with that; Ray would connect it
    anew, to a cluster that it starts for the purpose.
    """
    if not is_connected():
        return
    module = ray()
    for actor in actors:
        with contextlib.suppress(*system_errors(), ValueError):
            module.kill(actor, no_restart=True)


async def answer(ref: Any) -> Any:
    """Await what a call of an actor gives; a cancellation drops the waiter, and not the call.

    Raises:
        Exception: What the call raised, or what became of the actor.
    """
    return await asyncio.wrap_future(ref.future())


async def off_loop(
    what: str, function: Callable[..., T], /, *args: Any, timeout: float, undo: Callable[[T], object] | None = None
) -> T:
    """Make a blocking call on a thread of its own, which nobody has to wait for at the end of the program.

    Args:
        what: What it does, for the error and the thread's name, as in ``init``.
        function: The call.
        args: For it.
        timeout: Seconds.
        undo: Given what came of the call if nobody waited for it any longer; likewise on a thread.

    Raises:
        CallTimeout: It takes longer; the thread goes on.
    """
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    outcome.set_running_or_notify_cancel()  # whoever waits may leave: that ends no call
    waiting = asyncio.wrap_future(outcome)
    waiting.add_done_callback(_hear)
    on_thread(what, lambda: _settle(outcome, function, args))
    try:
        await asyncio.wait([waiting], timeout=timeout)
    except asyncio.CancelledError:
        _undo(what, outcome, undo)
        raise
    if not waiting.done():
        _undo(what, outcome, undo)
        raise CallTimeout(f"ray: {what}", timeout, started=True)
    return waiting.result()


def _hear(waiting: asyncio.Future[Any]) -> None:
    """Its error is nobody's, if nobody waits any longer."""
    if not waiting.cancelled():
        waiting.exception()


def _settle(outcome: concurrent.futures.Future[T], function: Callable[..., T], args: tuple[Any, ...]) -> None:
    try:
        value = function(*args)
    except BaseException as error:  # noqa: BLE001 - whoever waits gets it
        outcome.set_exception(error)
    else:
        outcome.set_result(value)


def _undo(what: str, outcome: concurrent.futures.Future[T], undo: Callable[[T], object] | None) -> None:
    if undo is None:
        return

    def do() -> None:
        with contextlib.suppress(BaseException):  # nobody is left to hear of it
            undo(outcome.result())

    on_thread(f"undo {what}", do)


def on_thread(what: str, function: Callable[[], object]) -> None:
    """Run it on a thread of its own, which nobody waits for."""
    threading.Thread(target=function, name=f"aexec-ray-{what.replace(' ', '-')}", daemon=True).start()
