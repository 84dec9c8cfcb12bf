from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from aexec.errors import ConfigError
from aexec.executor.external.launcher import Launched, World, read_launch
from aexec.executor.external.store import LauncherStore, TrainerStore
from aexec.executor.external.surroundings import address_of, store_of, trainer_world

pytestmark = pytest.mark.anyio


def launched(**changes):
    place = {"master_addr": "127.0.0.1", "master_port": 29500, "has_store": True, "local_world_size": 2} | changes
    return Launched(launcher="torchrun", rank=0, world_size=4, local_rank=0, **place)


async def test_ranks_of_one_node_need_no_address():
    """They meet on a socket of the machine, and nothing listens on a network."""
    assert await address_of(launched(local_world_size=4)) is None


async def test_the_address_that_is_set_counts(monkeypatch):
    """G38: an explicit one is never second-guessed."""
    monkeypatch.setenv("AEXEC_HOST_IP", "10.1.2.3")
    assert await address_of(launched(master_addr="10.9.9.9")) == "10.1.2.3"


async def test_ranks_whose_node_nobody_has_counted_may_be_on_several(monkeypatch):
    """As those of a trainer's world, or with variables set by hand: an address that is known is used."""
    told = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    monkeypatch.delenv("AEXEC_HOST_IP", raising=False)
    assert await address_of(read_launch({**told, "MASTER_ADDR": "127.0.0.1"})) is None
    monkeypatch.setenv("AEXEC_HOST_IP", "10.1.2.3")
    assert await address_of(read_launch({**told, "MASTER_ADDR": "10.9.9.9"})) == "10.1.2.3"
    assert await address_of(read_launch({}, World(1, 2))) == "10.1.2.3"


async def test_a_loopback_address_is_none_for_other_nodes(monkeypatch):
    """G38: who would get it could not use it; the remedy is a variable on each node."""
    monkeypatch.delenv("AEXEC_HOST_IP", raising=False)
    for host in ("127.0.0.1", "no.such.host.invalid"):
        with pytest.raises(ConfigError, match=r"is not known \(MASTER_ADDR is .*set AEXEC_HOST_IP to it on each node"):
            await address_of(launched(master_addr=host))


def test_a_trainers_world_is_shared(monkeypatch):
    """It is asked for without importing torch, and its store is where ranks find each other."""
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    assert trainer_world() is None
    made = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 1, get_world_size=lambda: 4
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", made)
    assert trainer_world() == (1, 4)
    assert isinstance(store_of(launched(is_initialised=True)), TrainerStore)
    assert isinstance(store_of(launched()), LauncherStore)
