"""Executors: obtain workers, send each call to all ranks, see every error, watch over their lives.

``base`` is the contract that everybody relies on; ``group`` is what a new backend
implements; everything between the two is written once. Each name is imported when it is
first used: a worker's process goes through here to the few modules that it shares with
its driver, and wants none of the driver's actors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aexec.lazy import lazy_names

if TYPE_CHECKING:
    from aexec.executor.base import Executor as Executor
    from aexec.executor.base import ExecutorEvent as ExecutorEvent
    from aexec.executor.base import FailureCallback as FailureCallback
    from aexec.executor.group import GroupPlan as GroupPlan
    from aexec.executor.group import GroupSink as GroupSink
    from aexec.executor.group import WorkerGroup as WorkerGroup

__all__ = ("Executor", "ExecutorEvent", "FailureCallback", "GroupPlan", "GroupSink", "WorkerGroup")
__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "aexec.executor.base": ("Executor", "ExecutorEvent", "FailureCallback"),
        "aexec.executor.group": ("GroupPlan", "GroupSink", "WorkerGroup"),
    },
)
