from __future__ import annotations

import pytest

from aexec import ExecutorConfig, environ
from aexec.errors import ConfigError
from aexec.executor.multiproc.nodes.address import leader_place


def place(**settings):
    return leader_place(ExecutorConfig(nnodes=2, **settings))


@pytest.fixture(autouse=True)
def no_address_of_its_own(monkeypatch):
    """Nothing is said from outside."""
    monkeypatch.delenv(environ.HOST_IP.name, raising=False)


def test_the_leader_listens_where_it_is_reached():
    """At one address, and nowhere else; ranks of other nodes come to the same."""
    assert place() == ("127.0.0.1", "127.0.0.1")
    assert place(master_addr="127.9.8.7") == ("127.9.8.7", "127.9.8.7")
    assert place(master_addr="::1") == ("::1", "::1")
    assert place(master_addr="localhost").listen in {"127.0.0.1", "::1"}


def test_a_node_with_several_networks_says_which_one(monkeypatch):
    """MN-06: the variable is stronger than the interface; a master_addr that was given stays where nodes come to."""
    assert place(node_interface="lo") == ("127.0.0.1", "127.0.0.1")
    monkeypatch.setenv(environ.HOST_IP.name, "127.1.2.3")
    assert place(node_interface="lo") == ("127.1.2.3", "127.1.2.3")
    assert place(master_addr="127.9.8.7") == ("127.9.8.7", "127.1.2.3")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"master_addr": "192.0.2.1"}, "master_addr is '192.0.2.1', which is no address of this machine, and the "),
        ({"master_addr": "no-such-host.invalid"}, "master_addr is 'no-such-host.invalid', which nobody knows"),
        ({"node_interface": "none0"}, "node_interface is 'none0', which has no address here: expected one of .*lo"),
    ],
)
def test_an_address_of_somebody_else_is_refused(settings, text):
    """Before anything listens; the text says what the executor's node has to do with it."""
    with pytest.raises(ConfigError, match=text):
        place(**settings)


@pytest.mark.parametrize("address", ["0.0.0.0", "192.0.2.1", "a name"])
def test_a_variable_that_names_no_address_of_this_machine_is_refused(monkeypatch, address):
    """AEXEC_HOST_IP is checked as a setting is."""
    monkeypatch.setenv(environ.HOST_IP.name, address)
    with pytest.raises(ConfigError, match=f"AEXEC_HOST_IP is '{address}'"):
        place()
