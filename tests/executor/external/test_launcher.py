from __future__ import annotations

import pytest

from aexec import ParallelConfig
from aexec.errors import ConfigError
from aexec.executor.external.launcher import World, device_of_rank, first_host, layout_of, read_launch
from aexec.parallel.layout import RankLayout

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "node[03-04,7],gpu1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
}


def of(size: int, local_rank: int = 0):
    return read_launch({**TORCHRUN, "RANK": "0", "WORLD_SIZE": str(size), "LOCAL_RANK": str(local_rank)})


def test_torchruns_variables_say_which_rank_this_is():
    """EXT-01: rank, node, place to meet, and that the launcher keeps a store there."""
    found = read_launch(TORCHRUN)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 8, 1, 4)
    assert (found.master_addr, found.master_port, found.node_rank, found.attempt) == ("10.0.0.7", 29500, 1, 2)
    assert (found.launcher, found.has_store, found.is_initialised, found.is_one_node) == (
        "torchrun",
        True,
        False,
        False,
    )
    assert str(found) == "rank 5 of 8 (local rank 1 of 4 on node 1, started by torchrun)"


def test_slurms_variables_do_as_well():
    """The first node of the list is where they meet, at a port that follows from job and step; there is no store."""
    found = read_launch(SLURM)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 7, 1, 3)
    assert (found.launcher, found.master_addr, found.node_rank, found.has_store) == ("srun", "node03", 1, False)
    other = read_launch({**SLURM, "SLURM_STEP_ID": "3"})
    assert 10_000 <= found.master_port < 30_000
    assert other.master_port != found.master_port


def test_a_place_to_meet_that_is_given_counts_under_slurm():
    """For those whose nodes have names that others cannot resolve."""
    found = read_launch({**SLURM, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4000"})
    assert (found.master_addr, found.master_port) == ("10.0.0.9", 4000)


def test_torchrun_inside_a_slurm_job_counts():
    """SLURM's variables are about the shell there, and are left alone."""
    assert str(read_launch({**SLURM, **TORCHRUN})) == str(read_launch(TORCHRUN))


def test_all_that_is_missing_is_named_at_once():
    """EXT-01: never a KeyError; with the ways to start properly."""
    with pytest.raises(ConfigError) as nothing:
        read_launch({})
    text = str(nothing.value)
    assert "RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set here" in text
    assert "torchrun --nproc-per-node 2 script.py" in text
    assert "srun --ntasks 2" in text
    assert "backend='mp'" in text
    with pytest.raises(ConfigError, match="RANK, WORLD_SIZE, MASTER_ADDR are set, and LOCAL_RANK, MASTER_PORT are not"):
        read_launch({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"})
    with pytest.raises(ConfigError, match=r"LOCAL_RANK is not set here"):
        read_launch({**TORCHRUN, "LOCAL_RANK": ""})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"RANK": "8"}, "RANK is '8': expected a number from 0 to 7"),
        ({"RANK": "-1"}, "RANK is '-1': expected a number from 0 to 7"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many': expected a number from 1 to"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK is '4': expected a number from 0 to 3"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE is '9': expected a number from 1 to 8"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is '70000': expected a number from 1 to 65535"),
    ],
)
def test_what_cannot_be_is_refused(changes, said):
    """With the variable, what it says, and what was expected."""
    with pytest.raises(ConfigError, match=said):
        read_launch({**TORCHRUN, **changes})


def test_slurms_own_name_is_in_the_error():
    """Who has only ever seen SLURM_PROCID is told of that one."""
    with pytest.raises(ConfigError, match=r"RANK is '9' \(from SLURM_PROCID\): expected a number from 0 to 6"):
        read_launch({**SLURM, "SLURM_PROCID": "9"})


def test_a_trainers_world_needs_no_variables():
    """torch.distributed is initialised: its world says who this is, and is shared."""
    found = read_launch({}, World(1, 4))
    assert (found.rank, found.world_size, found.local_rank, found.is_initialised) == (1, 4, 1, True)
    both = read_launch({**TORCHRUN, "MASTER_ADDR": "", "MASTER_PORT": ""}, World(5, 8))
    assert (both.launcher, both.rank, both.is_initialised) == ("torchrun", 5, True)
    with pytest.raises(
        ConfigError, match=r"initialised in this process as rank 0 of 2, and its environment says rank 5"
    ):
        read_launch(TORCHRUN, World(0, 2))


def test_the_number_of_replicas_follows_from_the_number_of_ranks():
    """G53: 8 ranks with TP 2 are 4 replicas, not a world of 8 with one model."""
    layout = layout_of(of(8), ParallelConfig(tensor_parallel_size=2))
    assert layout == RankLayout(tensor=2, pipeline=1, data=4)
    assert layout.tensor_groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout_of(of(8), ParallelConfig(2, 2)).data == 2
    assert layout_of(of(8), ParallelConfig(2, 2, data_parallel_size=2)).data == 2


def test_a_world_that_does_not_divide_is_refused_with_the_numbers():
    """G53: before anything is started."""
    said = (
        "torchrun has started 8 ranks, and tensor_parallel_size=3 x pipeline_parallel_size=1 takes 3 for each replica"
    )
    with pytest.raises(ConfigError, match=said):
        layout_of(of(8), ParallelConfig(tensor_parallel_size=3))
    with pytest.raises(ConfigError, match=r"data_parallel_size is 3, .* 8 ranks .* 4 replicas of .*: .* or start 6"):
        layout_of(of(8), ParallelConfig(2, 1, data_parallel_size=3))


def test_a_rank_takes_the_device_at_its_local_rank():
    """G40: what a process sees is the launcher's or the user's business, in that order, whatever the names."""
    assert device_of_rank(of(8, 2), ["0", "1", "2", "3"]) == "cuda:2"
    assert device_of_rank(of(8, 1), ["GPU-7f", "MIG-1a"]) == "cuda:1"
    assert device_of_rank(of(8, 3), ["5"]) == "cuda:0"
    assert device_of_rank(of(8, 3), []) == "auto"
    with pytest.raises(ConfigError, match=r"local rank 3 .*sees 2 devices \(0, 1\): start no more ranks"):
        device_of_rank(of(8, 3), ["0", "1"])


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a1", "a1"), ("a1,a2", "a1"), ("a[3-7]", "a3"), ("a[007,9-11]-ib,b", "a007-ib"), ("", "")],
)
def test_the_first_of_slurms_hosts_is_found(nodes, first):
    """As SLURM writes lists of them."""
    assert first_host(nodes) == first
