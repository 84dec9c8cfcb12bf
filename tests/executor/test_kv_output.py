from __future__ import annotations

import pytest

from aexec.executor import kv_output
from aexec.executor.kv_output import KVOutputs
from aexec.messages.batch import KVConnectorOutput, ModelRunnerOutput
from aexec.messages.step import ForwardLaunched, StepResult


def said(sending=(), receiving=(), **more):
    return KVConnectorOutput(finished_sending=frozenset(sending), finished_recving=frozenset(receiving), **more)


def answers(*parts, step=1):
    """What three ranks answer; the last one is the output rank."""
    *others, own = parts
    output = ModelRunnerOutput(request_ids=["r"], kv_connector_output=own)
    return {rank: StepResult(step, part) for rank, part in enumerate(others)} | {len(others): StepResult(step, output)}


@pytest.fixture
def outputs() -> KVOutputs:
    return KVOutputs(3, 2)


def report(result):
    return result.output.kv_connector_output


def test_a_request_is_sent_when_all_ranks_have_sent_it(outputs):
    """OUT-05: over several steps, each rank once."""
    assert report(outputs.result(answers(said("a"), None, None))).finished_sending == frozenset()
    assert report(outputs.result(answers(said("a"), said("a"), None))).finished_sending == frozenset()
    assert report(outputs.result(answers(None, None, said("a")))).finished_sending == {"a"}
    assert repr(outputs) == "<KVOutputs: 0 sendings and 0 receivings are incomplete>"


def test_a_connector_may_expect_fewer_ranks(outputs):
    """Its own count is what has to report."""
    found = report(outputs.result(answers(None, said(receiving="b", expected_finished_count=1), None)))
    assert found.finished_recving == {"b"}


def test_lost_blocks_figures_and_events_come_together(outputs):
    """Blocks are united, figures added up, events follow each other in rank order."""
    found = report(
        outputs.result(
            answers(
                said(
                    invalid_block_ids=frozenset({1, 2}), dropped=frozenset({b"a"}), stats={"bytes": 1.0}, events=("x",)
                ),
                said(invalid_block_ids=frozenset({2}), dropped=frozenset({b"b"}), events=("y",)),
                said(stats={"bytes": 2.0, "calls": 1.0}),
            )
        )
    )
    assert found.invalid_block_ids == {1, 2}
    assert found.dropped == {b"a", b"b"}
    assert found.stats == {"bytes": 3.0, "calls": 1.0}
    assert found.events == ("x", "y")


def test_anything_else_passes_unchanged(outputs):
    """Without a connector, and payloads of a worker class of one's own: the very object."""
    plain = answers(None, None, None)
    assert outputs.result(plain) is plain[2]
    own = {rank: StepResult(1, ("mine", rank)) for rank in range(3)}
    assert outputs.result(own) is own[2]
    launched = {rank: ForwardLaunched(1) for rank in range(3)}
    assert outputs.result(launched) is launched[2]
    alone = {0: StepResult(1, ModelRunnerOutput(kv_connector_output=said("a")))}
    assert KVOutputs(1, 0).result(alone) is alone[0]


def test_what_nobody_was_given_comes_with_the_next_step(outputs):
    """A report is not lost with the step whose driver has gone."""
    outputs.collect(answers(said("a", invalid_block_ids=frozenset({7})), said("a"), said("a")))
    found = report(outputs.result(answers(None, None, None)))
    assert (found.finished_sending, found.invalid_block_ids) == ({"a"}, {7})
    assert report(outputs.result(answers(None, None, None))) is None


def test_requests_that_never_complete_are_bounded(outputs, monkeypatch):
    """The oldest is forgotten."""
    monkeypatch.setattr(kv_output, "MAX_UNFINISHED", 2)
    for request in ("a", "b", "c"):
        outputs.collect(answers(said([request]), None, None))
    assert repr(outputs) == "<KVOutputs: 2 sendings and 0 receivings are incomplete>"
