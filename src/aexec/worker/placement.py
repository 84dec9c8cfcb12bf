"""Which processors and how many threads a rank takes. Pure, but for what reads ``/sys``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

__all__ = (
    "bind_to_node",
    "installed_devices",
    "node_of_device",
    "num_threads",
    "numa_nodes",
    "parse_cpus",
    "processors_of_gpu",
)

_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")


def num_threads(cpus: int, local_world_size: int) -> int:
    """Threads of one worker's own pool: all workers of a node together have no more than it has processors."""
    return max(1, cpus // max(1, local_world_size))


def parse_cpus(text: str) -> frozenset[int]:
    """A list as the kernel writes it: ``0-3,8`` is processors 0, 1, 2, 3 and 8."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def bind_to_node(nodes: Mapping[int, frozenset[int]], allowed: Iterable[int], node: int | None) -> tuple[int, ...]:
    """The processors for a rank whose device hangs on ``node``; empty: leave it to the kernel.

    Args:
        nodes: Processors by NUMA node.
        allowed: Processors that the process may use at all.
        node: Of the rank's device; None or -1: it has none, or the machine does not tell.
    """
    if len(nodes) < 2 or node is None or node < 0:
        return ()
    return tuple(sorted(nodes.get(node, frozenset()) & frozenset(allowed)))


def numa_nodes(root: Path = _NODES) -> dict[int, frozenset[int]]:
    """Processors by NUMA node, as the kernel tells it; empty where it does not."""
    found: dict[int, frozenset[int]] = {}
    for entry in sorted(root.glob("node[0-9]*/cpulist")):
        number = re.fullmatch(r"node(\d+)", entry.parent.name)
        if number is not None:
            found[int(number[1])] = parse_cpus(entry.read_text(encoding="ascii"))
    return found


def node_of_device(pci_addresses: Sequence[str], index: int, root: Path = _PCI) -> int | None:
    """The NUMA node of a device by its place in a list of PCI addresses; None: not known.

    Args:
        pci_addresses: As in ``0000:17:00.0``, in the order in which devices are numbered.
        index: The device's number.
        root: Where the kernel lists PCI devices.
    """
    if not 0 <= index < len(pci_addresses):
        return None
    try:
        return int((root / pci_addresses[index].lower() / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def installed_devices(proc: Path = Path("/proc")) -> tuple[str, ...]:
    """The NVIDIA devices of this node by number, as its driver lists them; no CUDA library is loaded."""
    folder = proc / "driver/nvidia/gpus"
    return tuple(str(number) for number in range(len(list(folder.iterdir())))) if folder.is_dir() else ()


def processors_of_gpu(
    device: str,
    allowed: Iterable[int],
    *,
    gpus: Path = Path("/proc/driver/nvidia/gpus"),
    pci: Path = _PCI,
    nodes: Path = _NODES,
) -> tuple[int, ...]:
    """The processors next to an NVIDIA device; empty: leave it to the kernel.

    Args:
        device: Its number as the driver counts, as in ``CUDA_VISIBLE_DEVICES``; of one that
            goes by another name nothing is known.
        allowed: Processors that the process may use at all.
        gpus: Where the driver lists its devices, by PCI address.
        pci: Where the kernel lists PCI devices.
        nodes: Where it lists NUMA nodes.
    """
    if not (device.isdecimal() and gpus.is_dir()):
        return ()
    addresses = sorted(entry.name for entry in gpus.iterdir())
    return bind_to_node(numa_nodes(nodes), allowed, node_of_device(addresses, int(device), pci))
