"""Two nodes find each other, or say why not; and find each other again after a failure. G48, G49."""

from __future__ import annotations

import os
import re
import signal
import socket
import time

import pytest
from nodes import nodes as nodes

pytestmark = pytest.mark.timeout(120)

ANSWERS = """
async def main():
    async with make() as executor:
        pids = await executor.collective_rpc("pid")
        await executor.collective_rpc("complain", ("words of a worker\\n",), ranks=[3])
        say(
            same=pids == [info.pid for info in executor.ranks],
            nodes=[info.node for info in executor.ranks],
            keys=await executor.collective_rpc("variable", ("AEXEC_NODE_KEY",)),
        )

asyncio.run(main())
"""
ANNOUNCES = """
import re

async def main():
    ports = []
    def progress(phase, done, total):
        found = re.search(r"--master-port (\\d+)", phase)
        if found and not ports:
            ports.append(int(found[1]))
            say(port=ports[0])
    async with open_executor(config(), progress=progress) as executor:
        say(answers=len(await executor.collective_rpc("pid")))

asyncio.run(main())
"""
REFUSED = """
async def main():
    try:
        await make(start_timeout=5.0)
    except AexecError as error:
        say(**facts_of(error))

asyncio.run(main())
"""
RESTARTS = """
async def main():
    async with make(on_failure=Restart(max_restarts=2, backoff=0.05)) as executor:
        events = executor.events()
        say(pids=[info.pid for info in executor.ranks])
        (error,) = await asyncio.gather(executor.collective_rpc("native_sleep", (60.0,)), return_exceptions=True)
        say(**facts_of(error), rank=error.rank)
        async for event in events:
            if type(event).__name__ == "GroupRestarted":
                break
        say(generation=executor.generation, answers=len(await executor.collective_rpc("pid")),
            pids=[info.pid for info in executor.ranks])

asyncio.run(main())
"""


def test_a_follower_may_come_first(nodes):
    """It waits for its leader, and says where; what its workers print is seen there, with the rank in front.

    Its key may come by the environment, and then workers do not inherit it.
    """
    follower = nodes.follow(key_file=None, AEXEC_NODE_KEY=nodes.key.read_text().strip())
    follower.shows(f"waiting for the leader at {nodes.near}:{nodes.port}")
    leader = nodes.lead(ANSWERS)
    said = leader.hear()
    assert said["same"]
    assert len(set(said["nodes"])) == 2
    assert said["keys"] == [None] * 4
    assert follower.shows("words of a worker").startswith("(rank 3 pid")
    assert (leader.finish(), follower.finish()) == (0, 0)
    assert "this node is done" in follower.errors


def test_nodes_of_ipv6(nodes):
    """Addresses of either kind: the leader listens there, and the ranks' own groups meet there."""
    nodes.on_one_machine("::1")
    leader = nodes.lead("""
async def main():
    async with make(1, 2) as executor:
        say(sums=await executor.collective_rpc("join_group"))

asyncio.run(main())
""")
    follower = nodes.follow()
    follower.shows("joined the leader at [::1]")
    assert leader.hear() == {"sums": [1, 1]}
    assert (leader.finish(), follower.finish()) == (0, 0)


def test_a_loop_that_is_blocked_is_no_death(nodes):
    """Signs of life are ZMQ's own threads': the user's code may hold up the loop, and the interpreter, for long."""
    leader = nodes.lead("""
async def main():
    async with make(node_timeout=2.0) as executor:
        say(up=True)
        time.sleep(5.0)
        say(answers=len(await executor.collective_rpc("pid")))

asyncio.run(main())
""")
    follower = nodes.follow(node_timeout=2.0)
    leader.hear()
    assert leader.hear() == {"answers": 4}
    assert (leader.finish(), follower.finish()) == (0, 0)


def test_a_leader_without_followers_says_what_to_run_where(nodes):
    """A start that waits for a node ends after ``start_timeout`` with the command that is missing."""
    error = nodes.lead(REFUSED).hear()
    assert error["error"] == "CallTimeout"
    text = error["text"] + str(error["notes"])
    assert f"aexec worker --nnodes 2 --node-rank 1 --master-addr {nodes.near} --master-port {nodes.port}" in text


def test_a_second_node_of_one_number_is_refused(nodes):
    """The first one and the group do not notice; the second is told why, and to what to change it."""
    leader = nodes.lead("""
async def main():
    async with make() as executor:
        say(up=True)
        while not os.path.exists(PLACE["node_key_file"] + ".go"):
            await executor.collective_rpc("pid", timeout=5.0)
        say(calls=len(await executor.collective_rpc("pid")))

asyncio.run(main())
""")
    first = nodes.follow()
    leader.hear()
    second, wrong_count = nodes.follow(), nodes.follow(nnodes=3, node_rank=2)
    assert (second.finish(), wrong_count.finish()) == (2, 2)
    assert "there is a node 1 already" in second.shows("refused")
    assert "--nnodes 3" in wrong_count.shows("refused")
    nodes.key.with_name(nodes.key.name + ".go").touch()
    assert leader.hear() == {"calls": 4}
    assert (leader.finish(), first.finish()) == (0, 0)
    assert "comes second" in leader.errors


def test_a_node_with_another_key_is_refused(nodes, tmp_path):
    """It is told so at once, and the leader goes on waiting for the right one."""
    leader = nodes.lead(ANSWERS)
    other = tmp_path / "other.key"
    nodes.new_key(other)
    stranger = nodes.follow(key_file=other)
    assert stranger.finish() == 2
    assert "it has another key than this node" in stranger.shows("refused this node")
    follower = nodes.follow()
    assert leader.hear()["same"]
    assert (leader.finish(), follower.finish()) == (0, 0)


def test_leaders_that_start_at_once_do_not_meet(nodes):
    """G49: eight at the same time on one address, each with port 0: eight ports, told in the start's progress."""
    leaders = [nodes.lead(ANNOUNCES, master_port=0) for _ in range(8)]
    ports = [leader.hear()["port"] for leader in leaders]
    assert len(set(ports)) == 8
    follower = nodes.follow(master_port=ports[3])
    assert leaders[3].hear() == {"answers": 4}
    assert (leaders[3].finish(), follower.finish()) == (0, 0)


def test_a_fixed_port_that_is_taken_names_its_owner(nodes):
    """G49: the error has port, address, whose it is, and what to do."""
    if nodes.is_apart:
        owner = nodes.hold_port()
        pid = owner.pid
    else:
        taken = socket.create_server((nodes.near, 0))
        nodes.port, pid = taken.getsockname()[1], os.getpid()
    error = nodes.lead(REFUSED).hear()
    assert error["error"] == "ConfigError"
    assert re.search(rf"master_port {nodes.port} of {nodes.near} is taken by pid {pid} ", error["text"])
    if not nodes.is_apart:
        taken.close()


def test_a_killed_worker_of_another_node_is_restarted(nodes):
    """The whole group comes anew, on the same agent."""
    leader, follower = nodes.lead(RESTARTS), nodes.follow()
    pids = leader.hear()["pids"]
    time.sleep(0.3)
    os.kill(pids[2], signal.SIGKILL)
    assert leader.hear()["rank"] == 2
    again = leader.hear()
    assert (again["generation"], again["answers"]) == (2, 4)
    assert not set(pids) & set(again["pids"])
    assert (leader.finish(), follower.finish()) == (0, 0)


def test_a_killed_agent_has_to_join_again(nodes):
    """The group waits for the node to come back, and goes on with it."""
    leader, follower = nodes.lead(RESTARTS), nodes.follow()
    leader.hear()
    time.sleep(0.3)
    follower.kill()
    assert "node 1" in leader.hear()["text"]
    again = nodes.follow()
    restarted = leader.hear()
    assert (restarted["generation"], restarted["answers"]) == (2, 4)
    assert (leader.finish(), again.finish()) == (0, 0)
