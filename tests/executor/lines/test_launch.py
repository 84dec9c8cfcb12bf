from __future__ import annotations

from aexec.config import ExecutorConfig
from aexec.executor.lines import spin_of


def test_a_spin_that_was_set_is_taken():
    """Else none where ranks and driver outnumber the CPUs: a rank that polls would keep the driver from running."""
    assert spin_of(ExecutorConfig(), ranks=10_000) == 0
    assert spin_of(ExecutorConfig(spin=0.01), ranks=10_000) == 0.01
