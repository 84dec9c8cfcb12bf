from __future__ import annotations

import os

import pytest

from aexec.worker.placement import bind_to_node, node_of_device, num_threads, numa_nodes, parse_cpus, processors_of_gpu

TWO = {0: frozenset({0, 1}), 1: frozenset({2, 3})}


@pytest.mark.parametrize(("cpus", "ranks", "threads"), [(8, 2, 4), (8, 3, 2), (2, 4, 1), (4, 0, 4)])
def test_workers_share_the_processors(cpus, ranks, threads):
    """PRC-18: at least one each."""
    assert num_threads(cpus, ranks) == threads


@pytest.mark.parametrize(("text", "cpus"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("", set())])
def test_the_kernels_lists_are_read(text, cpus):
    """Ranges and single processors."""
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize(
    ("nodes", "allowed", "node", "cpus"),
    [
        (TWO, {0, 1, 2, 3}, 1, (2, 3)),
        (TWO, {0, 1, 3}, 1, (3,)),
        (TWO, {0, 1}, 1, ()),
        (TWO, {0, 1, 2, 3}, None, ()),
        (TWO, {0, 1, 2, 3}, -1, ()),
        (TWO, {0, 1, 2, 3}, 7, ()),
        ({0: frozenset({0, 1})}, {0, 1}, 0, ()),
    ],
)
def test_a_rank_runs_where_its_device_is(nodes, allowed, node, cpus):
    """PRC-20: within what the process may use; where there is nothing to choose, the kernel does."""
    assert bind_to_node(nodes, allowed, node) == cpus


@pytest.fixture
def machine(tmp_path):
    """A machine with two nodes and a GPU on each."""
    for node, cpus in TWO.items():
        folder = tmp_path / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(",".join(map(str, sorted(cpus))) + "\n")
    for node, address in enumerate(("0000:17:00.0", "0000:ca:00.0")):
        (tmp_path / "pci" / address).mkdir(parents=True)
        (tmp_path / "pci" / address / "numa_node").write_text(f"{node}\n")
        (tmp_path / "gpus" / address).mkdir(parents=True)
    return tmp_path


def test_nodes_and_devices_are_found_where_the_kernel_lists_them(machine):
    """And what it does not list is not known."""
    assert numa_nodes(machine / "node") == TWO
    assert numa_nodes(machine / "nothing") == {}
    assert [node_of_device(["0000:17:00.0", "0000:CA:00.0"], at, machine / "pci") for at in (0, 1, 2)] == [0, 1, None]
    assert node_of_device(["0000:ff:00.0"], 0, machine / "pci") is None


@pytest.mark.parametrize(("device", "cpus"), [("1", (2, 3)), ("0", (0, 1)), ("7", ()), ("GPU-8932f937", ()), ("", ())])
def test_a_gpu_leads_to_its_processors(machine, device, cpus):
    """By its number; a name says nothing of its place."""
    places = {"gpus": machine / "gpus", "pci": machine / "pci", "nodes": machine / "node"}
    assert processors_of_gpu(device, {0, 1, 2, 3}, **places) == cpus


def test_this_machine_is_left_alone_without_devices():
    """Nothing is bound where nothing is to be gained."""
    assert processors_of_gpu("", os.sched_getaffinity(0)) == ()
