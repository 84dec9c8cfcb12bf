"""Executors: obtain workers, send each call to all ranks, see every error, watch over their lives.

``base`` is the contract that everybody relies on; ``group`` is what a new backend
implements; everything between the two is written once. Each name is imported when it is
first used: a worker's process goes through here to the few modules that it shares with
its driver, and wants none of the driver's actors.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aexec.executor.base import Executor as Executor
    from aexec.executor.base import ExecutorEvent as ExecutorEvent
    from aexec.executor.base import FailureCallback as FailureCallback
    from aexec.executor.group import GroupPlan as GroupPlan
    from aexec.executor.group import GroupSink as GroupSink
    from aexec.executor.group import WorkerGroup as WorkerGroup

__all__ = ("Executor", "ExecutorEvent", "FailureCallback", "GroupPlan", "GroupSink", "WorkerGroup")
# Where each name lives.
_ROOM_OF = {
    **dict.fromkeys(("Executor", "ExecutorEvent", "FailureCallback"), "aexec.executor.base"),
    **dict.fromkeys(("GroupPlan", "GroupSink", "WorkerGroup"), "aexec.executor.group"),
}


def __getattr__(name: str) -> Any:
    if (room := _ROOM_OF.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(room), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
