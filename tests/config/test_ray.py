from __future__ import annotations

import pickle

import pytest

from aexec.config import ExecutorConfig, ParallelConfig
from aexec.errors import ConfigError

WRONG = [
    ({"ray_address": " "}, "ray_address is empty: expected a name, or None"),
    ({"placement_group": ""}, "placement_group is empty"),
    ({"ray_resource": ""}, "ray_resource is empty"),
    ({"placement_strategy": "NEAR"}, "placement_strategy is 'NEAR': expected one of PACK, SPREAD, STRICT_PACK"),
    ({"placement_timeout": 0}, "placement_timeout is 0: expected a positive number of seconds"),
    ({"graph_timeout": -1.0}, "graph_timeout is -1.0: expected a positive"),
    ({"graph_idle_release": 0.0}, "graph_idle_release is 0.0: expected a positive"),
    ({"graph_buffer_bytes": 10}, "graph_buffer_bytes is 10: expected at least 65536"),
    ({"graph_transport": "tcp"}, "graph_transport is 'tcp': expected one of auto, nccl, shm"),
    ({"ray_step_plane": "graph"}, "ray_step_plane is 'graph': expected one of compiled_graph, channel"),
    ({"bundle_indices": "01"}, "bundle_indices is '01': expected a list of numbers"),
    ({"bundle_indices": [0, -1]}, r"bundle_indices is \[0, -1\]: expected a list of numbers from 0"),
    ({"bundle_indices": [True]}, "bundle_indices is .*: expected a list of numbers from 0"),
    ({"bundle_indices": [0], "placement_group": "new"}, "bundles can be chosen of a given group only"),
    ({"ray_resource_per_worker": 0}, "ray_resource_per_worker is 0: expected a fraction of one, or a whole number"),
    ({"ray_resource_per_worker": 1.5, "ray_resource": "pet"}, "ray_resource_per_worker is 1.5: expected a fraction"),
    ({"ray_resource_per_worker": 2}, "a rank has one device at most; say ray_resource='CPU'"),
    ({"ray_resource_per_worker": 2, "ray_resource": "TPU"}, "a rank has one device at most"),
    ({"ray_bundle_resources": {"CPU": 0}}, r"ray_bundle_resources\['CPU'\] is 0: expected a positive number"),
    ({"ray_bundle_resources": [("CPU", 1)]}, "ray_bundle_resources is .*: expected a dict"),
    ({"ray_runtime_env": "env.yaml"}, "ray_runtime_env is 'env.yaml': expected a dict"),
    ({"ray_nsight": "t"}, "ray_nsight is 't': expected True, or options of 'nsys profile'"),
    ({"graph_overlap": True, "graph_transport": "shm"}, "only 'nccl' sends while it computes; take graph_transport='n"),
    ({"graph_overlap": True, "ray_step_plane": "channel"}, "the channel plane has no graph"),
    ({"graph_transport": "nccl", "ray_step_plane": "channel"}, "the channel plane has no graph"),
]


@pytest.mark.parametrize(("settings", "text"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_a_setting_that_no_cluster_could_serve_is_refused_with_what_is_expected(
    settings: dict[str, object], text: str
) -> None:
    """The text names the setting, its value and what would do."""
    with pytest.raises(ConfigError, match=f"^ExecutorConfig.*{text}"):
        ExecutorConfig(backend="ray", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["uni", "mp", "external_launcher"])
def test_a_setting_of_ray_is_refused_by_another_backend(backend: str) -> None:
    """What would be ignored is not accepted."""
    with pytest.raises(ConfigError, match=f"bundle_indices is .* and backend is '{backend}': .* backend='ray'"):
        ExecutorConfig(backend=backend, bundle_indices=(0,))


def test_the_settings_of_ray_that_were_made_are_told_by_name() -> None:
    """Nothing is told of those that have their defaults, given or not."""
    config = ExecutorConfig(ray_resource="CPU", graph_idle_release=None, placement_strategy="PACK")
    assert config.ray_settings() == ("ray_resource", "graph_idle_release")


def test_the_settings_of_an_executor_travel() -> None:
    """A config with settings of its base class pickles to an equal one."""
    config = ExecutorConfig(
        backend="ray", parallel=ParallelConfig(2), bundle_indices=(3, 1), ray_resource="pet", ray_resource_per_worker=2
    )
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("name", ["env_allow", "env_extra", "env_deny", "preload"])
def test_one_text_is_no_list_of_texts(name: str) -> None:
    """A pattern by itself would be read letter by letter."""
    with pytest.raises(ConfigError, match=f"ExecutorConfig.{name} is 'NCCL_': expected a list of texts"):
        ExecutorConfig(**{name: "NCCL_"})  # type: ignore[arg-type]


def test_whose_value_counts_is_one_of_two() -> None:
    """The environment's precedence is the node's or the driver's."""
    with pytest.raises(ConfigError, match="env_precedence is 'both': expected one of node, driver"):
        ExecutorConfig(env_precedence="both")  # type: ignore[arg-type]
