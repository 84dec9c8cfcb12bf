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

__all__ = ("EXECUTOR_CHECKS", "NOT_REPLICATED", "MakeExecutor", "check_executor")

#: Every promise that can be checked from outside; a test may run them one by one.
EXECUTOR_CHECKS: tuple[Callable[[MakeExecutor], Awaitable[None]], ...] = (
    *CALL_CHECKS,
    *STEP_CHECKS,
    *LIFE_CHECKS,
    *OPERATION_CHECKS,
)


#: Checks that no replicated executor can pass (``Executor.is_replicated``), by name, with the reason. All ranks run
#: the same check, each in its process, and so it must not depend on the clock what a check asks for next.
NOT_REPLICATED = {
    "answers_never_reach_another_caller": "its limits pass at random, on each rank for other calls; its tasks then go "
    "on in another order on each of them",
    "a_cancelled_start_leaves_nothing_behind": "it cancels by the clock, and the rank that is first ends the start of "
    "the others, whose own cancellation then comes too late",
}


async def check_executor(make: MakeExecutor, *, replicated: bool = False) -> None:
    """Run all of :data:`EXECUTOR_CHECKS`.

    Args:
        make: Called as ``make(worker_cls, **settings)``; returns an async context
            manager that opens an executor of that worker class, on any number of ranks.
            ``settings`` are fields of ``ExecutorConfig``.
        replicated: Each rank's process runs this at the same time: leave out those of :data:`NOT_REPLICATED`.

    Raises:
        AssertionError: A promise is broken; the text says which.
    """
    for check in EXECUTOR_CHECKS:
        if replicated and check.__name__ in NOT_REPLICATED:
            continue
        try:
            await asyncio.wait_for(check(make), 2 * PATIENCE)
        except Exception as error:
            rule = (check.__doc__ or "").strip()
            raise AssertionError(f"{getattr(check, '__name__', check)}: {rule} {error}") from error
