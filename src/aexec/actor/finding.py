"""Which event loop runs here, and what the actor core does on it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
import threading

from aexec.actor.runtime import Runtime

__all__ = ("describe_here", "find_runtime")

# Anyio imports it at its first call, which would stop the loop for 35 ms; if it has another name, it does so still.
with contextlib.suppress(ImportError):
    importlib.import_module("anyio._backends._asyncio")


def find_runtime() -> Runtime:
    """The runtime of the loop that runs here; never imports what is not running.

    Raises:
        RuntimeError: No loop runs here.
    """
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        from aexec.actor._trio import TrioRuntime

        return TrioRuntime()
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError("no event loop runs here: open an actor system from a coroutine") from None
    from aexec.actor._asyncio import AsyncioRuntime

    return AsyncioRuntime(loop)


def describe_here() -> str:
    """Names the loop that runs here, for error texts."""
    try:
        return str(find_runtime())
    except RuntimeError:
        return f"thread {threading.current_thread().name!r}, which runs no loop"
