"""Ray on two nodes: who is which rank, how they reach each other, and what becomes of them when a node goes.

The nodes are two addresses of loopback, which share a kernel and a file system; with
``AEXEC_TEST_NAMESPACES=1`` (``nox -s netns``, as root) they are two network namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import ray_namespaces
from ray_session import Semaphores

from aexec.testing.tiny_models import save_tiny_model

pytestmark = pytest.mark.timeout(200)

PROGRAM = Path(__file__).with_name("two_nodes.py")
PLANES = ("compiled_graph", "channel")
NODES = ("near", "far")
PATIENCE = 150.0  # seconds for an answer; after 60 the program writes to its log what its threads are at
APART = os.environ.get("AEXEC_TEST_NAMESPACES") == "1"
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_NUM_THREADS": "1",
    "RES_OPTIONS": "timeout:1 attempts:1",  # torch asks for the name of each peer
    # A dead node is found dead after 1.5 s instead of 14.
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_initial_delay_ms": "500",
}


class Driver:
    """The program on the first node."""

    def __init__(self, process, log):
        self._process, self._log = process, log
        self.addresses = self.hear()

    def ask(self, name, *arguments):
        """Have it do one thing; what came of it."""
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        return self.hear()

    def hear(self):
        """The next line of its output; one that does not come is the end of the program, whose log then says where it was."""
        late = threading.Timer(PATIENCE, self._process.kill)
        late.start()
        line = self._process.stdout.readline()
        late.cancel()
        late.join()
        assert line, self._log.read_text()
        answer = json.loads(line)
        assert "value" in answer, answer["error"]
        return answer["value"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random Llama, in a folder that both nodes see."""
    return save_tiny_model("llama", tmp_path_factory.mktemp("two_nodes") / "llama")


@pytest.fixture(scope="module")
def driver(model, tmp_path_factory):
    """A driver on a cluster of two nodes, both of which end with the module."""
    log = tmp_path_factory.mktemp("two_nodes") / "stderr"
    with contextlib.ExitStack() as stack:
        stack.callback(Semaphores().sweep)  # last of all: a test kills a node
        folder = tempfile.mkdtemp(prefix="axr-", dir="/tmp")  # short enough for the names of Ray's sockets
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        environment = {**os.environ, **SETTINGS, "RAY_TMPDIR": folder}
        where, prefix = ["loopback"], []
        if APART:
            address, start_far, prefix = stack.enter_context(ray_namespaces.cluster(environment))
            where = [address, json.dumps(start_far)]
        command = [*prefix, sys.executable, str(PROGRAM), str(model), *where]
        process = stack.enter_context(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=stack.enter_context(log.open("w")), text=True, env=environment,
            )
        )  # fmt: skip
        stack.callback(process.kill)  # if it is still there
        stack.callback(process.stdin.close)
        yield Driver(process, log)
        process.stdin.close()
        assert process.wait(30) == 0, log.read_text()


@pytest.fixture(scope="module", params=[("compiled_graph", 1, 2), ("channel", 2, 1)], ids=PLANES)
def together(request, driver):
    """Two ranks: stages, whose hidden states the graph carries, or halves of each layer, whose sums torch adds up.

    Their placement group has the other node's bundle first.
    """
    return driver.ask("together", *request.param)


def test_rank_0_is_on_the_drivers_node_wherever_bundles_were_made(driver, together):
    """G43: the other node's bundle comes first, and is the last rank."""
    assert [place["ip"] for place in together["places"]] == [driver.addresses["near"], driver.addresses["far"]]
    assert together["bundles"] == [1, 0]
    assert [(place["rank"], place["local_rank"]) for place in together["places"]] == [(0, 0), (1, 0)]
    assert len({place["node"] for place in together["places"]}) == 2


def test_ranks_on_two_nodes_say_what_one_alone_says(driver, together):
    """Token for token, on both planes, with a model of torch whose ranks need each other in each step."""
    assert together["answers"] == driver.ask("alone")


def test_lines_to_another_node_are_tcp(together):
    """Told by Ray's id of the node: here a Unix socket would reach it just as well."""
    assert together["lines"] == [["unix"] * 2, ["tcp"] * 2]


def test_ranks_meet_at_rank_0s_node(driver, together):
    """At a port of its address, on the network that has it, with a secret that never went over a line."""
    interface = "eth0" if APART else "lo"
    for place in together["places"]:
        assert place["meet"].startswith(f"tcp://{driver.addresses['near']}:")
        assert place["has_secret"]
        assert place["env"]["GLOO_SOCKET_IFNAME"] == interface


def test_the_environment_is_copied_to_both_nodes(together):
    """What the driver has set since the nodes were started, as far as the rules let it out."""
    found = {(place["env"]["NCCL_TEST_OF_OURS"], place["env"]["NOT_TO_BE_COPIED"]) for place in together["places"]}
    assert found == {("from the driver", None)}


def test_stages_of_several_ranks_have_a_node_each(driver):
    """TP 2 x PP 2: each node counts its own ranks from 0, and the stages meet over TCP."""
    found, near, far = (driver.ask("together", "channel", 2, 2, None, "dummy"), *map(driver.addresses.get, NODES))
    assert [(place["ip"], place["local_rank"]) for place in found["places"]] == [
        (near, 0),
        (near, 1),
        (far, 0),
        (far, 1),
    ]
    assert found["bundles"] == [2, 3, 0, 1]
    assert found["answers"] == driver.ask("alone", "dummy")
    assert min(found["handed_on"][:2]) > 0


def test_bundles_that_were_asked_for_are_taken_in_their_order(driver):
    """Even if rank 0 is on another node than the driver then."""
    found = driver.ask("together", "channel", 1, 2, [0, 1], "dummy")
    assert [place["ip"] for place in found["places"]] == [driver.addresses["far"], driver.addresses["near"]]
    assert found["lines"] == [["tcp"] * 2, ["unix"] * 2]
    assert found["answers"] == driver.ask("alone", "dummy")


def test_two_nodes_with_one_address_are_refused(driver):
    """G38: with the table, before a worker waits for another in vain."""
    error = driver.ask("forge")
    assert error.startswith("ConfigError: each node of the cluster needs one address of its own")
    assert f"{driver.addresses['near']} is the address of several nodes" in error
    assert error.count(driver.addresses["near"]) == 3
    assert "ray start --node-ip-address" in error


@pytest.mark.parametrize("plane", PLANES)
def test_a_node_that_goes_takes_its_rank_along_and_the_rest_goes_on(driver, plane):
    """G67: SIGKILL of a node ends the step in flight within 5 s; the group comes back on the node that is left."""
    lost = driver.ask("lose_the_far_node", plane)
    near, far = driver.addresses["near"], driver.addresses["far"]
    assert sorted(lost["before"]) == [near, far]
    assert lost["seconds"] < 5.0
    assert (lost["rank"], lost["node"]) == (1, far)
    assert (lost["generation"], lost["after"], lost["again"]) == (2, [near, near], [2, 0])
