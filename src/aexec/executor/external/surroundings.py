"""What a launched process finds out about where it is: its trainer's world, its address, its store, its device."""

from __future__ import annotations

import asyncio
import socket
import sys
from dataclasses import dataclass, field
from typing import Any

from aexec import environ
from aexec.errors import ConfigError
from aexec.executor.external.launcher import Launched, World, device_of_rank, read_launch
from aexec.executor.external.store import LauncherStore, TorchStore, TrainerStore
from aexec.executor.lines.environment import visible_devices
from aexec.worker.placement import installed_devices

__all__ = ("Card", "address_of", "device_of", "launched_here", "store_of", "trainer_world")


@dataclass(frozen=True, slots=True)
class Card:
    """What each rank tells all others before they make their workers.

    Attributes:
        settings: What all have to have alike, for people.
        device: Of its worker, as ``device_of`` says it.
        init_method: Of rank 0: where ``torch.distributed`` is to meet.
        secret: Of rank 0: what the ranks prove to each other that they belong together.
    """

    settings: str
    device: str
    init_method: str = ""
    secret: bytes = field(default=b"", repr=False)


def launched_here() -> Launched:
    """Which rank this process is, as its environment and its trainer have it now.

    Raises:
        ConfigError: Nobody has said, or not all of it.
    """
    return read_launch(environ.inherited(), trainer_world())


def trainer_world() -> World | None:
    """The ``torch.distributed`` world of this process, if it is initialised; torch is not imported for it."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return World(distributed.get_rank(), distributed.get_world_size())


def device_of(launched: Launched) -> str:
    """The device of this rank, of those that this process sees.

    Raises:
        ConfigError: It sees several, and none for its local rank.
    """
    return device_of_rank(launched, visible_devices(environ.inherited(), installed_devices()))


def store_of(launched: Launched) -> TorchStore:
    """How the ranks find each other before they have lines."""
    if launched.is_initialised:
        return TrainerStore()
    return LauncherStore(
        launched.master_addr,
        launched.master_port,
        rank=launched.rank,
        world_size=launched.world_size,
        serve=not launched.has_store,
        attempt=launched.attempt,
    )


async def address_of(launched: Launched) -> str | None:
    """This node's address for the others; None: all ranks are on this one, and need none.

    It is ``AEXEC_HOST_IP`` if that is set, else the one from which ``MASTER_ADDR`` is reached. Where
    nobody has said how many ranks this node has, and there is no address either, it has all of them.

    Raises:
        ConfigError: There is none.
    """
    if launched.is_one_node:
        return None
    found = environ.HOST_IP.read() or await asyncio.to_thread(_own_address, launched.master_addr, launched.master_port)
    if not found and launched.knows_node:
        raise ConfigError(
            f"this is {launched}, and the address by which the ranks of other nodes reach this one is not known "
            f"(MASTER_ADDR is {launched.master_addr!r}): set AEXEC_HOST_IP to it on each node"
        )
    return found or None


def _own_address(host: str, port: int) -> str:
    """The address from which ``host`` is reached; empty: it is not, or only from this very machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of a datagram socket: nothing is sent
            own: str = probe.getsockname()[0]
    except OSError:
        return ""
    return "" if own == "::1" or own.startswith("127.") else own
