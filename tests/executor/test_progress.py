from __future__ import annotations

from aexec.executor.progress import StartProgress


def test_progress_is_the_sum_over_all_ranks():
    """Each rank reports for itself, and it is not done while a rank has yet to begin."""
    told = []
    progress = StartProgress(lambda *report: told.append(report), world_size=2)
    progress.report(0, "weights", 5, 10)
    progress.report(1, "weights", 1, 10)
    progress.report(0, "weights", 10, 10)
    assert told == [("weights", 5, 20), ("weights", 6, 20), ("weights", 11, 20)]


def test_a_phase_counts_the_ranks_that_are_through():
    """Of all ranks."""
    told = []
    StartProgress(lambda *report: told.append(report), world_size=4).phase("load_model", 3)
    assert told == [("load_model", 3, 4)]


def test_a_callback_that_fails_is_called_no_more():
    """A progress bar cannot spoil a start."""
    told = []

    def broken(*report):
        told.append(report)
        raise RuntimeError("no terminal")

    progress = StartProgress(broken, world_size=1)
    progress.phase("load_model", 0)
    progress.phase("load_model", 1)
    assert len(told) == 1


def test_nobody_has_to_listen():
    """Without a callback nothing happens."""
    StartProgress(None, world_size=1).phase("load_model", 0)
