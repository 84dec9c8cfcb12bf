from __future__ import annotations

import pytest

from aexec.config import ExecutorConfig
from aexec.executor.lines.launch import spin_of


@pytest.mark.parametrize(("cpus", "chosen"), [({5}, 0.0), ({0, 5}, 200e-6)])
def test_a_spin_that_was_set_is_taken(monkeypatch, cpus, chosen):
    """Else one that is worth it: there is none on a single CPU."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: cpus)
    assert spin_of(ExecutorConfig()) == chosen
    assert [spin_of(ExecutorConfig(spin=spin)) for spin in (0.0, 0.01)] == [0.0, 0.01]
