"""Backend ``mp``: many processes on one node."""

from __future__ import annotations

from aexec.executor.multiproc.group import MultiprocGroup as MultiprocGroup

__all__ = ("MultiprocGroup",)
