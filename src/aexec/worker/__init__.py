"""One rank: the worker class behind it, its compute thread, and its three lanes."""

from __future__ import annotations

from aexec.worker.compute import cancelled as cancelled
from aexec.worker.context import WorkerContext as WorkerContext

__all__ = ("WorkerContext", "cancelled")
