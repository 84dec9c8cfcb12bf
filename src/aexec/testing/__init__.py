"""For tests, yours included: a clock, probes, faults, a leak check, contract checks.

The executors' part (``check_executor``) is imported when it is first used, so that a test
suite of actors pays for actors alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aexec.testing import faults as faults
from aexec.testing.clock import VirtualClock as VirtualClock
from aexec.testing.leaks import LeakCheck as LeakCheck
from aexec.testing.leaks import Leaked as Leaked
from aexec.testing.probe import Probe as Probe
from aexec.testing.probe import Received as Received
from aexec.testing.probe import spawn_probe as spawn_probe

if TYPE_CHECKING:
    from aexec.testing.contracts import EXECUTOR_CHECKS as EXECUTOR_CHECKS
    from aexec.testing.contracts import MakeExecutor as MakeExecutor
    from aexec.testing.contracts import check_executor as check_executor

__all__ = (
    "EXECUTOR_CHECKS",
    "LeakCheck",
    "Leaked",
    "MakeExecutor",
    "Probe",
    "Received",
    "VirtualClock",
    "check_executor",
    "faults",
    "spawn_probe",
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from aexec.testing import contracts

    return getattr(contracts, name)
