"""Hidden states as tensors from rank to rank, on gloo."""

from __future__ import annotations


def test_hidden_states_go_through_all_stages_in_order(run_ranks):
    """TP 2 x PP 3, with collectives of the tensor parallel group in between: nothing gets mixed up."""
    answers = run_ranks("hand_on", tensor=2, pipeline=3)
    assert all(answer["seen"] == [True] * 5 for answer in answers)
    assert [answer["sent"] for answer in answers] == [5, 5, 5, 5, 0, 0]
    assert [answer["received"] for answer in answers] == [0, 0, 5, 5, 5, 5]


def test_a_dtype_and_a_view_arrive_as_they_are(run_ranks):
    """bfloat16, and a tensor whose memory is in another order."""
    assert run_ranks("keep_dtype", pipeline=2) == [True, True]


def test_a_stage_runs_ahead_and_no_further_than_its_bound(run_ranks):
    """PP-02: a send does not wait until one more than the stages there are is under way."""
    first, second = run_ranks("run_ahead", pipeline=2)
    assert first["in_flight"] == 3
    assert first["through"] > second["began"]
    assert second["received"] == [1000, 2000, 3000, 4000]


def test_a_failed_step_is_passed_on_and_the_next_one_runs(run_ranks):
    """The stage after does not wait for what will never come."""
    _, (text, second) = run_ranks("fail_one_step", pipeline=2)
    assert text == (
        "rank 1 could not receive the hidden states of step 1: rank 0 is gone or too late (it failed at this step)"
    )
    assert second


def test_a_killed_stage_ends_the_wait_at_once(run_ranks):
    """G62: long before the time is up, and the error names the peer."""
    _, answer = run_ranks("lose_a_peer", pipeline=2)
    assert answer["seconds"] < 5
    assert answer["peer"] == 0
    assert answer["text"].startswith("rank 1 could not receive the hidden states of step 7: rank 0 is gone")


def test_another_step_is_never_taken_for_the_own_one(run_ranks):
    """G54, G60: the wait has an end, and its error names the step."""
    _, text = run_ranks("wait_too_long", pipeline=2)
    assert "could not receive the hidden states of step 7" in text
    assert "Timed out waiting 300ms" in text
