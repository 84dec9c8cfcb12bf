"""Executors: obtain workers, send each call to all ranks, see every error, watch over their lives.

``base`` is the contract that everybody relies on; ``group`` is what a new backend
implements; everything between the two is written once.
"""

from __future__ import annotations

from aexec.executor.base import Executor as Executor
from aexec.executor.base import ExecutorEvent as ExecutorEvent
from aexec.executor.base import FailureCallback as FailureCallback
from aexec.executor.group import GroupPlan as GroupPlan
from aexec.executor.group import GroupSink as GroupSink
from aexec.executor.group import WorkerGroup as WorkerGroup

__all__ = ("Executor", "ExecutorEvent", "FailureCallback", "GroupPlan", "GroupSink", "WorkerGroup")
