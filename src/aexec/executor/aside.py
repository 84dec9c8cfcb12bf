"""What takes a while and may not hold up the loop, as giving back large shared memory does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

__all__ = ("run_aside",)


def run_aside(function: Callable[[], None]) -> asyncio.Future[None]:
    """Call it on a thread beside the loop; at once where the interpreter ends and gives out none any more.

    That is where an ``LLM`` is closed that nobody has closed.
    """
    loop = asyncio.get_running_loop()
    if threading.main_thread().is_alive():
        return loop.run_in_executor(None, function)
    function()
    done: asyncio.Future[None] = loop.create_future()
    done.set_result(None)
    return done
