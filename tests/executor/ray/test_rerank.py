from __future__ import annotations

import pytest

from aexec.errors import ConfigError
from aexec.executor.ray.rerank import NodeFacts, rerank


def at(node: str, ip: str, *devices: str, visible: tuple[str, ...] = (), cpus: int = 8) -> NodeFacts:
    """What an actor on a node says."""
    return NodeFacts(node_id=node, node_ip=ip, devices=devices, visible=visible, cpus=cpus)


A, B, C = ("a", "10.0.0.9"), ("b", "10.0.0.10"), ("c", "10.0.0.1")


def test_the_driver_s_node_comes_first_then_nodes_with_few_of_ours_then_by_address() -> None:
    """Rank 0 is where the driver is, although its bundles were made last."""
    facts = [at(*C), at(*C), at(*B), at(*A), at(*C), at(*B)]
    ranking = rerank(facts, driver_node="a")
    assert ranking.order == (3, 2, 5, 0, 1, 4)
    assert ranking.local_ranks == (0, 0, 1, 0, 1, 2)
    assert [ranking.local_world_size(rank) for rank in range(6)] == [1, 2, 2, 3, 3, 3]


def test_addresses_are_in_the_order_of_numbers_and_not_of_letters() -> None:
    """10.0.0.9 comes before 10.0.0.10, and IPv4 before IPv6."""
    facts = [at("d", "fd00::2"), at(*B), at(*A)]
    assert rerank(facts, driver_node="elsewhere").order == (2, 1, 0)


def test_on_a_node_ranks_are_in_the_order_of_their_devices_as_numbers() -> None:
    """Device 10 comes after device 9; a rank's own is found among all that its node shows."""
    facts = [at(*A, "10"), at(*A, "9"), at(*A, "2")]
    ranking = rerank(facts, driver_node="a")
    assert ranking.order == (2, 1, 0)
    assert ranking.visible_devices(0) == ("2", "9", "10")
    assert [ranking.device_index(rank) for rank in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("names", [("3", "2"), ("GPU-8ab1", "GPU-11c0"), ("MIG-b", "MIG-a")])
def test_a_node_s_own_list_of_devices_is_honoured_in_its_order(names: tuple[str, str]) -> None:
    """CUDA_VISIBLE_DEVICES=3,2 of a node means that 3 is the first."""
    facts = [at(*A, names[1], visible=names), at(*A, names[0], visible=names)]
    ranking = rerank(facts, driver_node="a")
    assert ranking.order == (1, 0)
    assert ranking.devices == {"a": names}


def test_ranks_that_share_a_device_see_it_once() -> None:
    """Four half devices are two devices, and each rank has the one that Ray gave it."""
    ranking = rerank([at(*A, "0"), at(*A, "1"), at(*A, "0"), at(*A, "1")], driver_node="a")
    assert ranking.visible_devices(3) == ("0", "1")
    assert [ranking.device_index(rank) for rank in range(4)] == [0, 0, 1, 1]


def test_an_order_that_was_asked_for_is_kept() -> None:
    """Explicit bundles are ranks in their order."""
    assert rerank([at(*C, "1"), at(*A, "1"), at(*C, "0")], driver_node="a", keep_order=True).order == (0, 1, 2)


@pytest.mark.parametrize(("ip", "loopback"), [("10.0.0.9", "127.0.0.1"), ("fd00::9", "::1")])
def test_ranks_of_one_node_meet_on_loopback_wherever_the_driver_is(ip: str, loopback: str) -> None:
    """No network is guessed where none is needed; an IPv6-only node has loopback too."""
    assert rerank([at("a", ip), at("a", ip)], driver_node="b", driver_ip="10.0.0.2").address == loopback


def test_ranks_of_several_nodes_meet_at_rank_0_s_node() -> None:
    """Its address is the one in Ray's table."""
    assert rerank([at(*B), at(*A)], driver_node="a").address == "10.0.0.9"


def test_nodes_that_share_an_address_are_refused_with_the_table() -> None:
    """Both nodes, and the driver's, are in the text."""
    with pytest.raises(ConfigError, match=r"10.0.0.9 is the address of several nodes") as caught:
        rerank([at("a", "10.0.0.9"), at("b", "10.0.0.9"), at(*C)], driver_node="a")
    assert "a  10.0.0.9  (driver)\n  b  10.0.0.9\n  c  10.0.0.1" in str(caught.value)
    assert "ray start --node-ip-address" in str(caught.value)


def test_a_node_that_shares_the_driver_s_address_is_refused() -> None:
    """The driver's node is checked although it has no rank."""
    with pytest.raises(ConfigError, match=r"127.0.0.1 is the address of several nodes"):
        rerank([at("b", "127.0.0.1")], driver_node="a", driver_ip="127.0.0.1")


def test_a_node_with_two_network_cards_is_one_node() -> None:
    """It is known by its id: workers that name different addresses of it are not spread over two nodes."""
    with pytest.raises(ConfigError, match="node a has several") as caught:
        rerank([at("a", "10.0.0.9"), at("a", "192.168.0.9")], driver_node="a")
    assert "a  10.0.0.9  (driver)\n  a  192.168.0.9  (driver)" in str(caught.value)


def test_a_ranking_is_printed_as_a_table() -> None:
    """A line for each rank: where it is, and what it has."""
    ranking = rerank([at(*A, "1"), at("b" * 20, "10.0.0.10")], driver_node="a")
    assert str(ranking) == (
        "rank  node          address    local rank  device  pid\n"
        "0     a             10.0.0.9   0           1       0\n"
        "1     bbbbbbbbbbbb  10.0.0.10  0           -       0"
    )
    assert ranking.device_index(1) is None


def test_ranks_of_a_node_share_its_cpus() -> None:
    """Each has one at least."""
    ranking = rerank([at(*A, cpus=5), at(*A, cpus=5), at(*B, cpus=1)], driver_node="a")
    assert [ranking.cpus(rank) for rank in range(3)] == [2, 2, 1]
