from __future__ import annotations

from types import SimpleNamespace

import pytest

from aexec.config import CacheConfig, Offload
from aexec.errors import ConfigError
from aexec.messages.batch import KVConnectorOutput, KVTransfer, ModelRunnerOutput, SchedulerOutput
from aexec.worker.kv.offload import RankOffload
from aexec.worker.kv.steps import connector_of, make_connector, reported, run_step

PLACE = SimpleNamespace(rank=1, world_size=2)
RUNNER = SimpleNamespace(kv_access=None)


class Told:
    """A connector that has one report, of step 3."""

    doubts = 0

    def take_report(self, step):
        return KVConnectorOutput(stats={"step": 3.0}) if step == 3 else None

    def doubt(self):
        self.doubts += 1


def test_settings_name_the_connector():
    """By name or as a class; without any there is none."""
    assert make_connector(None, PLACE, RUNNER) is None
    assert make_connector(CacheConfig(), PLACE, RUNNER) is None
    made = make_connector(CacheConfig(connector=Offload()), PLACE, RUNNER)
    assert isinstance(made, RankOffload)
    assert "rank 1" in repr(made)
    own = SimpleNamespace(scheduler_side="", worker_side=lambda *arguments: arguments)
    assert make_connector(CacheConfig(connector=own), PLACE, RUNNER) == (own, 1, 2, None)


def test_who_has_no_connector_says_so():
    """With the setting that makes one."""
    with pytest.raises(ConfigError, match=r"no KV connector: open the engine with kv_connector=Offload"):
        connector_of(None)


def test_a_report_goes_with_the_output_of_its_step():
    """Of the output rank beside the tokens, of any other alone; without a report outputs are as they were."""
    connector, output = Told(), ModelRunnerOutput(request_ids=["a"])
    both = reported(connector, 3, output)
    assert (both.request_ids, both.kv_connector_output.stats) == (["a"], {"step": 3.0})
    assert reported(connector, 3, None).kv_connector_output.stats == {"step": 3.0}
    assert reported(connector, 2, output) is output
    assert reported(connector, 2, None) is None
    assert reported(None, 3, output) is output


def test_blocks_are_moved_before_the_forward_pass():
    """Where there is something to move, and somebody to move it."""
    transfer = KVTransfer(epoch=1)
    for connector, batch, expected in (
        (Told(), SchedulerOutput(kv_transfer=transfer), ["move 5", "forward 5"]),
        (Told(), SchedulerOutput(), ["forward 5"]),
        (None, SchedulerOutput(kv_transfer=transfer), ["forward 5"]),
    ):
        done = []
        if connector is not None:
            connector.move = lambda step, moved, done=done: done.append(f"move {step}")
        run_step(connector, 5, batch, lambda step, batch, done=done: done.append(f"forward {step}"))
        assert done == expected


def test_a_forward_pass_that_fails_leaves_doubt():
    """And its error goes on as it was."""

    def fail(step, batch):
        raise RuntimeError("forward")

    connector = Told()
    for each in (connector, None):
        with pytest.raises(RuntimeError, match="forward"):
            run_step(each, 5, SchedulerOutput(), fail)
    assert connector.doubts == 1
