from __future__ import annotations

from typing import Any

import pytest

from aexec.config import ExecutorConfig
from aexec.errors import ConfigError
from aexec.executor.describe import describe
from aexec.executor.ray.environment import (
    OwnEnvironment,
    SentEnvironment,
    environment_of_rank,
    node_environment,
    plan_environment,
)
from aexec.executor.ray.rerank import NodeFacts, rerank

HERE = {
    "PATH": "/usr/bin", "HOME": "/root", "NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_secret", "VLLM_X": "1", "MY_FLAG": "on",
    "PYTHONHASHSEED": "7", "AWS_SECRET_ACCESS_KEY": "x", "RANK": "3", "CUDA_VISIBLE_DEVICES": "5", "RAY_ADDRESS": "h:1",
    "VLLM_HOST_IP": "10.0.0.1", "GLOO_SOCKET_IFNAME": "eth7", "AEXEC_LOG_LEVEL": "info",
}  # fmt: skip
OWN = OwnEnvironment({"RANK": "0"}, (), {"OMP_NUM_THREADS": "4"})


def sent(never: tuple[str, ...] = (), **settings: Any) -> SentEnvironment:
    """What a driver with HERE sends."""
    return plan_environment(HERE, ExecutorConfig(backend="ray", **settings), never)


def test_what_the_trade_s_libraries_read_is_sent_and_nothing_else() -> None:
    """Neither the driver's paths, nor its other secrets, nor what tells of its own place."""
    names = ("NCCL_DEBUG", "HF_TOKEN", "VLLM_X", "PYTHONHASHSEED", "GLOO_SOCKET_IFNAME", "AEXEC_LOG_LEVEL")
    assert sent().copied == {name: HERE[name] for name in names}


@pytest.mark.parametrize(
    ("settings", "more", "fewer"),
    [
        ({"env_extra": ("MY_*",)}, {"MY_FLAG"}, set()),
        ({"env_deny": ("HF_*", "VLLM_X")}, set(), {"HF_TOKEN", "VLLM_X"}),
        ({"env_extra": ("MY_*",), "env_deny": ("MY_FLAG",)}, set(), set()),
        ({"never": ("HF_TOKEN",)}, set(), {"HF_TOKEN"}),
        ({"never": ("MY_*",), "env_extra": ("MY_*",)}, set(), set()),
        ({"env_allow": ("MY_*",)}, {"MY_FLAG"}, set(sent().copied)),
        ({"env_allow": ("*",)}, {"PATH", "HOME", "MY_FLAG", "AWS_SECRET_ACCESS_KEY"}, set()),
        ({"env_extra": ("RANK", "RAY_ADDRESS", "CUDA_VISIBLE_DEVICES", "VLLM_HOST_IP")}, set(), set()),
    ],
)
def test_allow_extra_deny_and_the_exclusion_file_say_what_is_sent(
    settings: dict[str, Any], more: set[str], fewer: set[str]
) -> None:
    """Extra names come besides those of the list, denials are the strongest, and some names never go."""
    assert set(sent(**settings).copied) == (set(sent().copied) | more) - fewer


def test_a_value_that_the_node_has_is_kept_unless_the_driver_is_to_win() -> None:
    """Network cards, say, have other names there."""
    there = {"GLOO_SOCKET_IFNAME": "ib0"}
    assert "GLOO_SOCKET_IFNAME" not in sent().changes(there, there, OWN)
    assert sent(env_precedence="driver").changes(there, there, OWN)["GLOO_SOCKET_IFNAME"] == "eth7"


def test_env_wins_over_node_driver_and_runtime_env() -> None:
    """What is said in so many words counts."""
    there = {"NCCL_DEBUG": "WARN"}
    settings = {"env": {"NCCL_DEBUG": "TRACE"}, "ray_runtime_env": {"env_vars": {"NCCL_DEBUG": "WARN"}}}
    assert sent(**settings).changes(there, there, OWN)["NCCL_DEBUG"] == "TRACE"


@pytest.mark.parametrize("precedence", ["node", "driver"])
def test_a_variable_of_the_runtime_env_is_kept(precedence: str) -> None:
    """It was set for these workers, the driver's was not."""
    plan = sent(ray_runtime_env={"env_vars": {"VLLM_X": "2"}}, env_precedence=precedence)
    assert "VLLM_X" not in plan.changes({"VLLM_X": "2"}, {}, OWN)


def test_threads_are_a_share_of_the_node_s_cpus_unless_somebody_says_otherwise() -> None:
    """What Ray sets in every worker is nobody's word; what the node, the driver or the user says is."""
    there = {"OMP_NUM_THREADS": "1"}
    by_ray, by_node = node_environment(there, raylet={}), node_environment(there, raylet=there)
    assert sent().changes(there, by_ray, OWN)["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS" not in sent().changes(there, by_node, OWN)
    assert sent(env={"OMP_NUM_THREADS": "2"}).changes(there, by_ray, OWN)["OMP_NUM_THREADS"] == "2"
    runtime_env = {"env_vars": {"OMP_NUM_THREADS": "1"}}
    assert "OMP_NUM_THREADS" not in sent(ray_runtime_env=runtime_env).changes(there, by_ray, OWN)
    assert plan_environment({"OMP_NUM_THREADS": "3"}, ExecutorConfig()).changes(there, by_ray, OWN) == {
        "OMP_NUM_THREADS": "3", "RANK": "0"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("there", "changed"),
    [
        ({"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "0,1"}),
        ({"HIP_VISIBLE_DEVICES": "1"}, {"HIP_VISIBLE_DEVICES": "0,1"}),
        ({}, {"CUDA_VISIBLE_DEVICES": "0,1"}),
    ],
)
def test_a_rank_sees_the_devices_of_all_ranks_of_its_node(there: dict[str, str], changed: dict[str, str]) -> None:
    """In the list that Ray has set for one device."""
    facts = [NodeFacts(node_id="a", node_ip="10.0.0.1", devices=(device,), cpus=8) for device in "01"]
    own = environment_of_rank(1, rerank(facts, "a"))
    changes = SentEnvironment({}, {}).changes(there, there, own)
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert changes == {**place, "OMP_NUM_THREADS": "4", **changed}


def test_a_rank_without_devices_keeps_the_list_as_ray_has_it() -> None:
    """A worker on CPUs alone is not shown any."""
    assert "CUDA_VISIBLE_DEVICES" not in sent().changes({"CUDA_VISIBLE_DEVICES": ""}, {}, OWN)


def test_devices_are_ray_s_to_say() -> None:
    """Two layers that set one list make wrong or empty ones."""
    with pytest.raises(ConfigError, match=r"env\['CUDA_VISIBLE_DEVICES'\] is '2,3': .* where 'ray start' runs"):
        sent(env={"CUDA_VISIBLE_DEVICES": "2,3"})


def test_what_was_sent_is_described_and_secrets_are_hidden() -> None:
    """Names are told, and values that are no secrets; the object itself prints names alone."""
    plan = sent(env={"MY_API_KEY": "abc"})
    shown = describe(ExecutorConfig(), {}, plan.shown()).environment
    assert shown["NCCL_DEBUG"] == "INFO"
    assert shown["HF_TOKEN"] == shown["MY_API_KEY"] == "(hidden)"
    assert "hf_secret" not in repr(plan)
    assert "abc" not in repr(plan)
