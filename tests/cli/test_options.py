from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from aexec.cli.options import EngineOptions, NodeFlags, RayFlags, SamplingOptions
from aexec.config import ExecutorConfig
from aexec.config.nodes import NodeOptions
from aexec.errors import InvalidRequest


def test_the_default_is_greedy() -> None:
    """The same command prints the same text."""
    assert SamplingOptions().params().is_greedy


def test_options_of_ray_are_settings_of_its_executor() -> None:
    """Each has the name and the default that it has there, so that nothing is changed by a command without them."""
    assert EngineOptions(model="dummy", executor="ray").executor_config == ExecutorConfig(backend="ray")
    flags = RayFlags(ray_address="auto", ray_step_plane="channel", ray_resource_per_worker=0.5)
    config = EngineOptions(model="dummy", ray=flags).executor_config
    assert config.ray_settings() == ("ray_address", "ray_resource_per_worker", "ray_step_plane")


def test_options_of_several_nodes_are_settings_of_mp() -> None:
    """Each has the name and the default that it has there."""
    assert EngineOptions(model="dummy", executor="mp").executor_config == ExecutorConfig(backend="mp")
    flags = NodeFlags(nnodes=2, master_addr="192.0.2.10", node_allow=("192.0.2.0/28",), ranks_per_node=(1, 2))
    config = EngineOptions(model="dummy", nodes=flags).executor_config
    assert config.node_settings() == ("nnodes", "master_addr", "node_allow", "ranks_per_node")
    settings = {each.name for each in dataclasses.fields(NodeOptions)} - {"node_rank"}  # an executor is on node 0
    assert {each.name for each in dataclasses.fields(NodeFlags)} == settings


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"max_tokens": 0}, {"top_p": 2.0}]
)
def test_a_value_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    """The request's own checks hold for the command line too."""
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        SamplingOptions(**wrong).params()


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"json_schema": '{"type": "null"}'}, "json_schema"),
        ({"regex": "a+"}, "regex"),
        ({"choice": ("yes", "no")}, "choice"),
        ({"grammar": "start: /a/"}, "grammar"),
    ],
)
def test_the_form_of_the_output_can_be_asked_for(options: dict[str, str], kind: str) -> None:
    """By one option for each kind; without any there is none."""
    structured = SamplingOptions(**options).params().structured
    assert structured is not None
    assert structured.kind == kind
    assert getattr(structured, kind) == options[kind]
    assert SamplingOptions().params().structured is None


def test_two_forms_at_once_are_refused() -> None:
    """The request's own check says which were given."""
    with pytest.raises(InvalidRequest, match="given regex and choice"):
        SamplingOptions(regex="a", choice=("a",)).params()


def test_a_schema_and_a_grammar_may_be_in_files(tmp_path: Path) -> None:
    """As ``@FILE``; one that cannot be read is named."""
    path = tmp_path / "schema.json"
    path.write_text('{"type": "null"}', encoding="utf-8")
    structured = SamplingOptions(json_schema=f"@{path}").params().structured
    assert structured is not None
    assert structured.json_schema == '{"type": "null"}'
    with pytest.raises(InvalidRequest, match=r"@nowhere\.lark cannot be read"):
        SamplingOptions(grammar="@nowhere.lark").params()
