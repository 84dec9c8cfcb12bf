"""Holds: each has a reason, and is released by itself."""

from __future__ import annotations

import pytest

from aexec.engine.holds import Holds


@pytest.mark.parametrize(
    ("modes", "while_running", "while_idle"),
    [
        ((), False, False),
        (("keep",), True, True),
        (("abort",), True, True),
        (("finish",), False, True),
        (("finish", "keep"), True, True),
    ],
)
def test_what_runs_goes_on_only_if_every_hold_lets_it_finish(modes, while_running, while_idle):
    """``finish`` holds once nothing runs any longer, the others at once."""
    holds = Holds()
    for number, mode in enumerate(modes):
        holds.add(f"reason {number}", mode)
    assert holds.hold_launches(is_running=True) is while_running
    assert holds.hold_launches(is_running=False) is while_idle
    assert bool(holds) is bool(modes)


def test_each_hold_is_released_by_its_reason():
    """Others stay; a reason that holds nothing changes nothing."""
    holds = Holds()
    holds.add("pause", "finish")
    holds.add("sleep", "keep")
    holds.add("pause", "abort")
    holds.remove("sleep")
    holds.remove("never")
    assert (holds.reasons, repr(holds)) == (("pause",), "<Holds: pause (abort)>")
    holds.remove("pause")
    assert (bool(holds), repr(holds)) == (False, "<Holds: none>")


def test_holds_of_the_same_reason_are_told_apart():
    """One that is given up leaves the others, and the mode of the latest of them counts; a bound is kept."""
    holds = Holds()
    holds.add("pause", "keep", 1)
    holds.add("pause", "finish", 2)
    assert repr(holds) == "<Holds: pause (finish)>"
    holds.remove("pause", 2)
    assert (holds.reasons, repr(holds)) == (("pause",), "<Holds: pause (keep)>")
    for key in range(100):
        holds.add("pause", "abort", key)
    assert len(holds._modes) == 64
    holds.remove("pause")
    assert not holds
