"""The groups of torch.distributed, on gloo."""

from __future__ import annotations

import sys

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


def test_replicas_of_one_launcher_have_groups_each_for_itself(run_ranks):
    """Eight ranks with TP 2 are four groups of two, however many replicas and stages they are (G53)."""
    for data, pipeline in ((4, 1), (2, 2), (1, 4)):
        answers = run_ranks("sums", tensor=2, pipeline=pipeline, data=data)
        assert [answer["tensor"] for answer in answers] == [11 * 10 ** (rank // 2 * 2) for rank in range(8)]
        assert {answer["world"] for answer in answers} == {11111111}
    assert "pipeline" not in run_ranks("sums", tensor=2, data=2)[0]


def test_stages_hand_on_within_their_replica(run_ranks):
    """Two replicas of two stages of two ranks: what each stage gets is what its own stage before sent."""
    answers = run_ranks("hand_on", tensor=2, pipeline=2, data=2)
    assert all(answer["seen"] == [True] * 5 for answer in answers)
    assert [answer["sent"] for answer in answers] == [5, 5, 0, 0] * 2


def test_a_lost_peer_of_another_replica_has_the_number_that_its_executor_gives_it(run_ranks):
    """Ranks 2 and 3 of the launcher are 0 and 1 of their replica."""
    text, rank, peer = run_ranks("lose_a_peer_of_the_second_replica", pipeline=2, data=2)[3]
    assert (rank, peer) == (1, 0)
    assert "rank 1 could not receive the hidden states of step 7: rank 0 is gone" in text


def test_a_world_that_a_trainer_made_outlives_many_engines(run_ranks):
    """Each makes groups of its own in it and takes them along; the trainer's collectives go on."""
    for rank, (*engines, total) in enumerate(run_ranks("lend_a_world", tensor=2, data=2)):
        assert engines == [[11 if rank < 2 else 1100, 2, True]] * 3  # the world, and the group that was there
        assert total == 4


def test_a_world_that_a_launcher_made_is_used_and_left_alone(run_ranks):
    """And one of another size is refused, by name."""
    for still_open, shown, text in run_ranks("meet_twice", pipeline=2):
        assert still_open
        assert shown.endswith("data=1): open in a world that was there>")
        assert "of 2: expected rank" in text
        assert "of 3; leave it to the executor, or let the layout agree" in text


@pytest.mark.parametrize("replaced", [False, True])
def test_the_world_goes_with_what_torch_did_to_the_process(tmp_path, replaced):
    """Its hook for uncaught errors names a rank that is no more; a hook that came later is left alone."""
    before, later = sys.excepthook, print
    for turn in range(2):
        meeting = f"file://{tmp_path}/meeting-{turn}"
        groups = open_groups(RankLayout(), 0, init_method=meeting, device="cpu", timeout=20.0)
        assert sys.excepthook is not before
        if replaced:
            sys.excepthook = later
        groups.close()
        assert sys.excepthook is (later if replaced else before)
        sys.excepthook = before


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
