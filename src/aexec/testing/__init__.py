"""For tests, yours included: contract checks, and workers that misbehave on demand."""

from __future__ import annotations

from aexec.testing.contracts import EXECUTOR_CHECKS as EXECUTOR_CHECKS
from aexec.testing.contracts import MakeExecutor as MakeExecutor
from aexec.testing.contracts import check_executor as check_executor

__all__ = ("EXECUTOR_CHECKS", "MakeExecutor", "check_executor")
