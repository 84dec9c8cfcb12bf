from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aexec.config import ExecutorConfig
from aexec.executor.lines.environment import (
    PER_RANK,
    SECRETS,
    device_of,
    group_environment,
    rank_environment,
    visible_devices,
)

HERE = {"PATH": "/bin", "HOME": "/root", "HF_TOKEN": "hf_abcdefghij", "MY_FLAG": "1", "NCCL_DEBUG": "INFO"}


def group(here=HERE, ranks=2, cpus=8, **settings):
    return group_environment(here, ExecutorConfig(**settings), ranks=ranks, cpus=cpus)


def test_all_is_inherited_by_default():
    """G39: a worker finds what its driver has."""
    assert group().items() >= HERE.items()


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PMI_RANK"])
def test_the_drivers_own_rank_is_not_inherited(name):
    """A driver that torchrun has started is a rank of something else; its workers are not."""
    assert name not in group({**HERE, name: "7"}, env_allow=(name,))


def test_lists_say_what_is_inherited():
    """G39: the excludes win over the names, and no list can take what an interpreter needs."""
    env = group(env_allow=("NCCL_*", "MY_*"), env_deny=("MY_FLAG",))
    assert set(HERE) & set(env) == {"PATH", "HOME", "NCCL_DEBUG"}


def test_what_is_given_comes_on_top():
    """ExecutorConfig.env is stronger than what is inherited, and than what we would set."""
    env = group(env={"MY_FLAG": "2", "OMP_NUM_THREADS": "5", "RANK": "mine"})
    assert (env["MY_FLAG"], env["OMP_NUM_THREADS"], env["RANK"]) == ("2", "5", "mine")


@pytest.mark.parametrize(("ranks", "cpus", "threads"), [(1, 8, "8"), (2, 8, "4"), (3, 8, "2"), (4, 2, "1")])
def test_ranks_share_the_cpus(ranks, cpus, threads):
    """PRC-18: the thread pools of all ranks together are no larger than the node."""
    assert group(ranks=ranks, cpus=cpus)["OMP_NUM_THREADS"] == threads
    assert group({"OMP_NUM_THREADS": "3"}, ranks=ranks, cpus=cpus)["OMP_NUM_THREADS"] == "3"


def test_gloo_stays_on_the_node():
    """Several ranks of one node talk by loopback, unless told otherwise; one rank has nobody to talk to."""
    assert group()["GLOO_SOCKET_IFNAME"] == "lo"
    assert group({"GLOO_SOCKET_IFNAME": "eth0"})["GLOO_SOCKET_IFNAME"] == "eth0"
    assert "GLOO_SOCKET_IFNAME" not in group(ranks=1)


def test_on_several_nodes_ranks_take_the_network_of_their_node():
    """Loopback leads to no other node; what is set already is kept."""
    network = {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    here = {**HERE, "NCCL_SOCKET_IFNAME": "ib0"}
    env = group_environment(here, ExecutorConfig(), ranks=2, cpus=8, network=network)
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("eth1", "ib0")
    assert "GLOO_SOCKET_IFNAME" not in group_environment(HERE, ExecutorConfig(), ranks=2, cpus=8, network={})


def test_the_key_of_the_nodes_is_not_inherited():
    """User code has no use for it, whatever the lists say."""
    assert SECRETS == ("AEXEC_NODE_KEY",)
    assert SECRETS[0] not in group({**HERE, SECRETS[0]: "ab" * 32}, env_allow=("*",), env_extra=("AEXEC_*",))


def test_a_rank_knows_its_place_as_under_torchrun():
    """Libraries look there."""
    assert rank_environment(3, 1, 4, 2) == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
    }


@given(st.dictionaries(st.sampled_from(PER_RANK), st.text()), st.lists(st.text(max_size=5)))
def test_no_allow_list_lets_a_rank_through(here, allow):
    """Whatever the lists say."""
    plain = {name: value for name, value in here.items() if "*" not in name}
    assert not set(group(plain, env_allow=allow)) & set(plain)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (None, ("0", "1", "2")),
        ("2,0", ("2", "0")),
        ("GPU-8932f937, MIG-1", ("GPU-8932f937", "MIG-1")),
        ("", ()),
        ("-1", ()),
        ("1,-1,2", ("1",)),
    ],
)
def test_a_list_of_devices_is_honoured_in_its_order(text, seen):
    """G40: numbers, UUIDs and MIG names; an invalid entry ends the list, as CUDA has it."""
    env = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert visible_devices(env, ("0", "1", "2")) == seen


def test_without_a_driver_there_is_no_device():
    """A list alone makes none."""
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "0,1"}, ()) == ()


def test_each_rank_takes_the_device_of_its_number():
    """G40: more than nine sort by number; a rank without one of its own chooses for itself."""
    devices = visible_devices({}, tuple(str(number) for number in range(12)))
    assert [device_of(rank, devices) for rank in (0, 9, 11, 12)] == ["cuda:0", "cuda:9", "cuda:11", "auto"]
    assert device_of(0, ()) == "auto"
