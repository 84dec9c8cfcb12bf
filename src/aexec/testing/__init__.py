"""For tests, yours included: a clock, probes, faults, a leak check, contract checks.

The parts for executors and channels (``check_executor``, ``check_channel``) are imported when
they are first used, so that a test suite of actors pays for actors alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aexec.lazy import lazy_names
from aexec.testing import faults as faults
from aexec.testing.clock import VirtualClock as VirtualClock
from aexec.testing.leaks import LeakCheck as LeakCheck
from aexec.testing.leaks import Leaked as Leaked
from aexec.testing.probe import Probe as Probe
from aexec.testing.probe import Received as Received
from aexec.testing.probe import spawn_probe as spawn_probe

if TYPE_CHECKING:
    from aexec.testing.channel_checks import CHANNEL_CHECKS as CHANNEL_CHECKS
    from aexec.testing.channel_checks import check_channel as check_channel
    from aexec.testing.contracts import EXECUTOR_CHECKS as EXECUTOR_CHECKS
    from aexec.testing.contracts import MakeExecutor as MakeExecutor
    from aexec.testing.contracts import check_executor as check_executor

__all__ = (
    "CHANNEL_CHECKS",
    "EXECUTOR_CHECKS",
    "LeakCheck",
    "Leaked",
    "MakeExecutor",
    "Probe",
    "Received",
    "VirtualClock",
    "check_channel",
    "check_executor",
    "faults",
    "spawn_probe",
)

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "aexec.testing.channel_checks": ("CHANNEL_CHECKS", "check_channel"),
        "aexec.testing.contracts": ("EXECUTOR_CHECKS", "MakeExecutor", "check_executor"),
    },
)
