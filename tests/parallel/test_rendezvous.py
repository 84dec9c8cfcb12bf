"""The port at which ranks on several nodes meet."""

from __future__ import annotations

import contextlib
import socket
import struct

import pytest

from aexec.errors import ConfigError
from aexec.parallel import rendezvous
from aexec.parallel.interfaces import Interface
from aexec.parallel.rendezvous import PortReservation, network_environment, tcp_address, tcp_url

_IP_LOCAL_PORT_RANGE = 51  # linux/in.h, since 6.3: from which ports the kernel chooses for this socket
EVERY_WAY = [(host, option) for host in ("127.0.0.1", "127.0.0.2", "0.0.0.0", "::", "::1") for option in (0, 2, 15)]


@pytest.fixture
def reservation():
    """A port that is kept until the test ends."""
    with contextlib.closing(PortReservation("127.0.0.2")) as made:
        yield made


def ask_for_any_port(sock, port):
    """Let the kernel choose, from this port alone."""
    sock.setsockopt(socket.IPPROTO_IP, _IP_LOCAL_PORT_RANGE, struct.pack("I", port << 16 | port))


@pytest.mark.parametrize(("host", "option"), EVERY_WAY)
def test_the_kernel_gives_a_kept_port_to_nobody(reservation, host, option):
    """G49: whatever address is asked for, with neither, SO_REUSEADDR, or SO_REUSEPORT."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as other:
        if option:
            other.setsockopt(socket.SOL_SOCKET, option, 1)
        ask_for_any_port(other, reservation.port)
        with pytest.raises(OSError, match="in use"):
            other.bind((host, 0))
    reservation.close()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as other:
        ask_for_any_port(other, reservation.port)
        other.bind((host, 0))
        assert other.getsockname()[1] == reservation.port


def test_a_connection_does_not_leave_from_a_kept_port(reservation):
    """Else torch could not listen there."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as caller:
        ask_for_any_port(caller, reservation.port)
        with pytest.raises(OSError, match="assign"):
            caller.connect(server.getsockname())


def test_nobody_can_connect_before_rank_0_listens(reservation):
    """The port is bound, and closed to the world."""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", reservation.port), 5.0)


@pytest.mark.parametrize("libuv", [0, 1])
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_torch_meets_at_a_kept_port(run_ranks, host, libuv):
    """Both of its servers, IPv4 and IPv6, while the port is still kept."""
    answers = run_ranks("sums", tensor=2, pipeline=2, at=f"{host} {libuv}")
    assert [answer["world"] for answer in answers] == [1111] * 4


def test_eight_starts_at_once_never_clash(run_ranks):
    """G49: 20 rounds, in which each of eight processes takes a port and has torch listen there."""
    rounds = zip(*run_ranks("start_at_once", tensor=8), strict=True)
    assert [len(set(ports)) for ports in rounds] == [8] * 20


def test_a_reservation_is_printed_and_let_go_once(reservation):
    """What it says is what torch is given."""
    assert repr(reservation) == f"<PortReservation tcp://127.0.0.2:{reservation.port}>"
    reservation.close()
    reservation.close()
    assert repr(reservation).endswith(", let go>")


def test_without_ipv6_the_port_is_kept_for_ipv4(monkeypatch):
    """As torch listens then."""
    bind = rendezvous._try_to_bind

    def no_ipv6(family, everywhere):
        if family == socket.AF_INET6:
            raise OSError("not supported")
        return bind(family, everywhere)

    monkeypatch.setattr(rendezvous, "_try_to_bind", no_ipv6)
    with (
        contextlib.closing(PortReservation("127.0.0.1")) as reservation,
        socket.socket() as torch_does_so,
    ):
        torch_does_so.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        torch_does_so.bind(("0.0.0.0", reservation.port))
        torch_does_so.listen()


def test_no_port_left_is_an_error_that_names_the_setting(monkeypatch):
    """Of the kernel."""

    def none_left(_family, _everywhere):
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(rendezvous, "_try_to_bind", none_left)
    with pytest.raises(ConfigError, match=r"Address already in use.*ip_local_port_range"):
        PortReservation("127.0.0.1")


@pytest.mark.parametrize("address", [("10.0.0.5", 1), ("fd00::2", 40123), ("a-host", 65535)])
def test_an_address_survives_the_way_through_a_url(address):
    """IPv6 has brackets there."""
    assert tcp_address(tcp_url(*address)) == address


@pytest.mark.parametrize("url", ["", "env://", "file:///tmp/x", "tcp://", "tcp://host", "tcp://host:", "tcp://h:1x"])
def test_what_is_no_address_is_told_apart(url):
    """None, and the caller says what would do."""
    assert tcp_address(url) is None


def test_loopback_is_enough_on_one_node():
    """And nccl finds its own way there."""
    assert network_environment("127.0.0.1", {}) == {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture
def network(monkeypatch):
    """Say which interface has an address."""
    return lambda found: monkeypatch.setattr(rendezvous, "interface_of", lambda _: found)


def test_the_network_of_the_nodes_address_is_taken(network):
    """By gloo, and by nccl, which takes every name that begins so unless it is told not to."""
    network(Interface("eth1", "eth1", is_loopback=False))
    assert network_environment("10.0.0.5", {}) == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}


def test_an_alias_is_called_as_libraries_list_it(network):
    """Else nccl would take what follows the colon for a port."""
    network(Interface("eth1", "eth1:0", is_loopback=False))
    assert network_environment("10.0.0.5", {}) == {"GLOO_SOCKET_IFNAME": "eth1:0", "NCCL_SOCKET_IFNAME": "eth1"}


def test_what_somebody_has_said_is_kept(network):
    """Their network may be a better one."""
    network(Interface("eth1", "eth1", is_loopback=False))
    there = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": ""}
    assert network_environment("10.0.0.5", there) == {"NCCL_SOCKET_IFNAME": "=eth1"}


def test_an_address_that_is_none_of_this_machines_says_nothing():
    """It may be translated on the way: libraries guess, as they do anyhow."""
    assert network_environment("203.0.113.9", {}) == {}
