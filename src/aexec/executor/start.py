"""From worker objects to workers that are ready: the hooks, in order, on all ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from aexec.errors import ConfigError
from aexec.executor.collective import Lane
from aexec.executor.fanout import Fanout
from aexec.messages.control import CallMethod, Hello
from aexec.worker.host import HOOKS

__all__ = ("run_hooks",)


async def run_hooks(fanout: Fanout, hellos: Sequence[Hello], report: Callable[[str, int], None]) -> None:
    """Call each hook that the worker class has on all ranks, one hook after the other.

    ``initialize_cache`` is given the least of what ``determine_available_memory``
    returned anywhere: all ranks hold the same blocks.

    Args:
        fanout: The way to the ranks.
        hellos: What they said of themselves.
        report: Told of each hook, with the number of ranks that are through it.

    Raises:
        ConfigError: ``determine_available_memory`` returned something else than bytes.
    """
    methods = hellos[0].methods
    args: tuple[Any, ...] = ()
    for hook in (hook for hook in HOOKS if hook in methods):
        report(hook, 0)
        answers = await _call(fanout, hook, args if hook == "initialize_cache" else ())
        report(hook, len(answers))
        if hook == "determine_available_memory":
            args = (_least_bytes(answers),)


async def _call(fanout: Fanout, hook: str, args: tuple[Any, ...]) -> dict[int, Any]:
    return await fanout.ask(hook, lambda call: CallMethod(call=call, method=hook, args=args), lane=Lane.SYNC)


def _least_bytes(answers: dict[int, Any]) -> int:
    return min(_bytes(rank, value) for rank, value in answers.items())


def _bytes(rank: int, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        text = f"determine_available_memory returned {value!r} on rank {rank}: expected bytes as an int"
        raise ConfigError(text) from None
