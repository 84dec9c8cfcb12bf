"""The contracts of aexec, as functions that anybody may run against an implementation.

::

    def make(worker_cls, **settings):
        config = ExecutorConfig(backend="my_package:MyGroup", worker_cls=worker_cls, **settings)
        return open_executor(config)

    await check_executor(make)

Each check states one promise of the design (section 4), and opens executors of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aexec.testing.call_checks import CALL_CHECKS
from aexec.testing.expect import PATIENCE, MakeExecutor
from aexec.testing.life_checks import LIFE_CHECKS
from aexec.testing.operation_checks import OPERATION_CHECKS
from aexec.testing.step_checks import STEP_CHECKS

__all__ = ("EXECUTOR_CHECKS", "MakeExecutor", "check_executor")

#: Every promise that can be checked from outside; a test may run them one by one.
EXECUTOR_CHECKS: tuple[Callable[[MakeExecutor], Awaitable[None]], ...] = (
    *CALL_CHECKS,
    *STEP_CHECKS,
    *LIFE_CHECKS,
    *OPERATION_CHECKS,
)


async def check_executor(make: MakeExecutor) -> None:
    """Run all of :data:`EXECUTOR_CHECKS`.

    Args:
        make: Called as ``make(worker_cls, **settings)``; returns an async context
            manager that opens an executor of that worker class, on any number of ranks.
            ``settings`` are fields of ``ExecutorConfig``.

    Raises:
        AssertionError: A promise is broken; the text says which.
    """
    for check in EXECUTOR_CHECKS:
        try:
            await asyncio.wait_for(check(make), 2 * PATIENCE)
        except Exception as error:
            rule = (check.__doc__ or "").strip()
            raise AssertionError(f"{getattr(check, '__name__', check)}: {rule} {error}") from error
