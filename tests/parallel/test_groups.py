"""The groups of torch.distributed, on gloo."""

from __future__ import annotations

import pytest

from aexec.errors import ConfigError
from aexec.parallel.groups import first_line, open_groups
from aexec.parallel.layout import RankLayout


def test_each_group_reaches_its_ranks_and_no_other(run_ranks):
    """TP 2 x PP 2 by a file of the parent that has no name: each rank adds 10 to the power of its number."""
    answers = run_ranks("sums", tensor=2, pipeline=2)
    assert [answer["world"] for answer in answers] == [1111] * 4
    assert [answer["tensor"] for answer in answers] == [11, 11, 1100, 1100]
    assert [answer["pipeline"] for answer in answers] == [101, 1010, 101, 1010]
    assert answers[3]["repr"] == "<Groups of rank 3 in RankLayout(tensor=2, pipeline=2, data=1): open>"


def test_a_world_that_a_launcher_made_is_used_and_left_alone(run_ranks):
    """And one of another size is refused, by name."""
    for still_open, text in run_ranks("meet_twice", pipeline=2):
        assert still_open
        assert "of 2: expected rank" in text
        assert "of 3; leave it to the executor, or let the layout agree" in text


def test_without_a_place_to_meet_nobody_waits():
    """The error names what the backend has to set."""
    with pytest.raises(ConfigError, match=r"2 ranks have to meet.*WorkerContext.distributed_init_method"):
        open_groups(RankLayout(tensor=2), 0, init_method="", device="cpu", timeout=1.0)


@pytest.mark.parametrize("device", ["mps", "xpu:0"])
def test_a_device_without_a_backend_is_refused(device):
    """RNK-10: never quietly slower than asked for."""
    with pytest.raises(ConfigError, match=f"device is '{device}': expected cpu or cuda"):
        open_groups(RankLayout(tensor=2), 0, init_method="file:///nowhere", device=device, timeout=1.0)


def test_errors_of_torch_are_cut_to_what_happened():
    """Without the place in its source, and without guesses."""
    error = RuntimeError("[/pytorch/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:1. Typically\nmore")
    assert first_line(error) == "Connection closed by peer [127.0.0.1]:1"
    assert first_line(RuntimeError("")) == "RuntimeError"
