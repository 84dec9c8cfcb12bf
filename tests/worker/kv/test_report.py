from __future__ import annotations

from aexec.messages.batch import KVTransfer
from aexec.worker.kv.report import MoveReport, merged


def report(invalid=(), dropped=(), **figures):
    return MoveReport(set(invalid), set(dropped), figures)


def test_there_is_nothing_to_tell_of_nothing():
    """A step that moved nothing has no report, so that its answer stays small."""
    assert merged({}, 3) is None
    assert merged({3: report()}, 3) is None


def test_reports_of_steps_that_were_given_up_come_along():
    """Their keys and figures count; their blocks are of no interest any longer."""
    found = merged(
        {2: report({7}, {b"a"}, stored_blocks=1.0), 3: report({8}, {b"b"}, stored_blocks=2.0, loaded_blocks=1.0)}, 3
    )
    assert found is not None
    assert (found.invalid_block_ids, found.dropped) == ({8}, {b"a", b"b"})
    assert found.stats == {"stored_blocks": 3.0, "loaded_blocks": 1.0}


def test_a_refusal_says_what_was_not_done():
    """Nothing stored, nothing loaded, and that it was refused."""
    refused = MoveReport()
    refused.refuse(
        KVTransfer(epoch=1, store_block_ids=[1], store_keys=[b"a"], load_block_ids=[2, 3], load_keys=[b"b", b"c"])
    )
    assert (refused.invalid, refused.dropped) == ({2, 3}, {b"a"})
    assert refused.figures == {"failed_stores": 1.0, "failed_loads": 2.0, "refusals": 1.0}


def test_figures_of_nothing_are_left_out():
    """A zero is not told."""
    quiet = MoveReport()
    quiet.count(stored_blocks=0, loaded_blocks=2)
    quiet.count(loaded_blocks=1)
    assert quiet.figures == {"loaded_blocks": 3.0}
