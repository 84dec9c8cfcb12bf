"""What a node says of itself, what the leader thinks of that, and whose a port is."""

from __future__ import annotations

import dataclasses
import os
import socket

import msgspec
import pytest

from aexec.errors import ConfigError, LeaderNotFound, NodeRefused, ProtocolError
from aexec.executor.multiproc.nodes.hosted import NodePlace
from aexec.executor.multiproc.nodes.join import (
    JoinOptions,
    address_towards,
    join_leader,
    join_of,
    objection,
    read_answer,
    worker_command,
)
from aexec.executor.multiproc.nodes.ports import owner_of_port
from aexec.messages.nodes import Join, Refused, Welcome, packed, unpacked
from aexec.transport.curve import NodeKey

PLACE = NodePlace(1, 2, "a-host", "10.0.0.6")
WHERE = "10.0.0.5:29501"


def said(**changes):
    """What this node says of itself, but for some of it."""
    return msgspec.structs.replace(join_of(PLACE), **changes)


def test_a_node_like_the_leader_is_let_in():
    """Same versions, same count, a number that is free."""
    assert objection(said(), nnodes=2, taken=()) == ""


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"aexec": "0.0.1"}, "install the same version on all nodes"),
        ({"wire": 99}, "install the same version on all nodes"),
        ({"python": "2.7"}, "take the same on all nodes"),
        ({"nnodes": 3}, "say the same on all nodes"),
        ({"node_rank": 0}, "expected 1 to 1"),
        ({"node_rank": 2}, "expected 1 to 1"),
        ({"node_rank": -1}, "expected 1 to 1"),
    ],
)
def test_a_node_that_does_not_fit_is_told_what_to_change(changes, remedy):
    """The reason names the node, what it has, and what is to be done; it is shown on both sides."""
    why = objection(said(**changes), nnodes=2, taken=())
    assert remedy in why
    assert "a-host (10.0.0.6" in why


def test_a_number_that_is_taken_is_refused():
    """Two nodes of one number would have the same ranks."""
    assert "a node 1 already" in objection(said(), nnodes=2, taken={1})


@pytest.mark.parametrize("each", [said(), Welcome(host="h", pid=1, world_size=4, node_timeout=3.0), Refused(why="no")])
def test_the_handshake_travels_without_pickle(each):
    """It is msgpack: plain values, which run no code when they are read."""
    data = packed(each)
    assert unpacked(data) == each
    assert b"aexec.messages" not in data


@pytest.mark.parametrize("data", [b"", b"\x80\x05.", b"garbage" * 100, msgspec.msgpack.encode({"type": "join"})])
def test_what_is_no_handshake_is_said_to_be_none(data):
    """Whoever sends something else gets no further, and the error shows how it began."""
    with pytest.raises(ProtocolError, match="the handshake of nodes has"):
        unpacked(data)


def test_a_refusal_reaches_the_follower_as_an_error():
    """It is the user's to mend: which node, which leader, why."""
    with pytest.raises(NodeRefused, match=f"the leader at {WHERE} refused node 1: there are enough"):
        read_answer(packed(Refused(why="there are enough")), PLACE, WHERE)


def test_an_answer_that_is_no_leaders_is_a_fault():
    """Two followers that found each other."""
    with pytest.raises(ProtocolError, match="it wants to join, too"):
        read_answer(packed(said()), PLACE, WHERE)


def test_a_welcome_is_read():
    """It says who leads, and how many ranks there are."""
    welcome = Welcome(host="h", pid=1, world_size=4, node_timeout=3.0)
    assert read_answer(packed(welcome), PLACE, WHERE) == welcome


@pytest.mark.anyio
async def test_the_address_towards_the_leader_is_this_nodes():
    """Found without sending anything."""
    assert await address_towards("127.0.0.1", 29501) == "127.0.0.1"


@pytest.mark.anyio
async def test_a_leader_that_has_no_address_is_said_to_have_none():
    """A name that nobody knows: the setting, and what is expected."""
    with pytest.raises(ConfigError, match=r"--master-addr is 'no-such-host\.invalid'"):
        await address_towards("no-such-host.invalid", 29501)


def test_the_command_of_a_follower_can_be_copied():
    """All that it needs, in one line."""
    command = worker_command(nnodes=2, node_rank=1, address="10.0.0.5", port=29501, key_file="nodes.key")
    assert command == (
        "aexec worker --nnodes 2 --node-rank 1 --master-addr 10.0.0.5 --master-port 29501 --key-file nodes.key"
    )


def test_a_place_of_ipv6_has_brackets():
    """As in a URL."""
    assert JoinOptions(nnodes=2, node_rank=1, leader="fd00::5", port=29501).where == "[fd00::5]:29501"


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_owner_of_a_port_is_found(family, host):
    """G49: whoever has the port that is wanted, by pid and name; nobody has one that is closed."""
    with socket.create_server((host, 0), family=family) as sock:
        port = sock.getsockname()[1]
        assert owner_of_port(port).startswith(f"pid {os.getpid()} (")
    assert owner_of_port(port) == ""


def test_a_join_knows_its_surroundings():
    """The agent's process, its CPUs, and which node it is."""
    join = join_of(PLACE)
    assert isinstance(join, Join)
    assert (join.node_rank, join.nnodes, join.pid) == (1, 2, os.getpid())
    assert join.cpus == len(os.sched_getaffinity(0))


@pytest.mark.anyio
async def test_a_name_that_nobody_knows_yet_is_waited_for(monkeypatch):
    """As a leader is that has yet to come: some networks know its name only once it is there. Said once."""
    tries, told = [], []

    async def later(host, port):
        tries.append(host)
        if len(tries) < 3:
            raise ConfigError(f"--master-addr is {host!r}, and this node has no way there")
        return "127.0.0.1"

    monkeypatch.setattr("aexec.executor.multiproc.nodes.join.address_towards", later)
    monkeypatch.setattr("aexec.executor.multiproc.nodes.join._PAUSE", 0.01)
    options = JoinOptions(nnodes=2, node_rank=1, leader="127.0.0.1", port=1, timeout=0.5)
    with pytest.raises(LeaderNotFound):
        await join_leader(options, NodeKey.random(), told.append)
    assert len(tries) == 3
    assert ["It is tried again" in text for text in told[:2]] == [True, False]
    tries[:] = []
    with pytest.raises(ConfigError, match="no way there"):
        await join_leader(dataclasses.replace(options, timeout=0.005), NodeKey.random(), told.append)
