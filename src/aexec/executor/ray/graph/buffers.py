"""How large the buffers of a graph are, and how many there are of each. Pure.

Each channel of the graph (the driver's to all ranks, each rank's to the stage after or to the
driver) has as many buffers as executions may be in flight, each as large as the largest message.
All of them lie in the object store of their writer's node for as long as the graph exists.
"""

from __future__ import annotations

from typing import NamedTuple

from aexec.errors import ConfigError
from aexec.parallel.layout import RankLayout

__all__ = ("DEFAULT_BYTES", "Buffers", "most_in_flight", "plan_buffers")

DEFAULT_BYTES = 16 << 20
LEAST_BYTES = 1 << 18
STORE_SHARE = 0.05  # of an object store: Ray 2.60 gives a graph's buffers back only when its driver leaves
_MOST = 16
_OVER_NODES = 1  # executions in flight


class Buffers(NamedTuple):
    """The buffers of a graph.

    Attributes:
        number: Of each channel; as many executions may be in flight.
        size: Of each, bytes.
    """

    number: int
    size: int


def plan_buffers(layout: RankLayout, asked: int | None, store: int | None) -> Buffers:
    """Decide.

    A step is two executions, and each stage works at another step.

    Args:
        layout: Of the executor.
        asked: ``ExecutorConfig.graph_buffer_bytes``.
        store: Bytes of the smallest object store that has to hold the graph; None: not known.

    Raises:
        ConfigError: What was asked for does not fit there.
    """
    count = min(2 * (layout.pipeline + 1), _MOST)
    channels = 1 + layout.size
    room = DEFAULT_BYTES if store is None else int(store * STORE_SHARE) // (channels * count)
    if asked is None:
        return Buffers(count, max(min(DEFAULT_BYTES, room), LEAST_BYTES))
    if store is not None and asked * channels * count > store:
        raise ConfigError(
            f"ExecutorConfig.graph_buffer_bytes is {asked:,}: {channels} channels with {count} such buffers each take "
            f"{asked * channels * count / 2**20:,.0f} MiB, and Ray's object store has {store / 2**20:,.0f} MiB; make "
            "them smaller, or start Ray with a larger object_store_memory"
        )
    return Buffers(count, asked)


def most_in_flight(buffers: Buffers, *, one_node: bool) -> int:
    """Executions that may be in flight.

    As many as there are buffers, on one node. Between nodes a channel has one buffer, and what
    comes there is written by the *main thread* of the node's raylet, which waits until the reader
    has taken the message before. It waits for ever if the reader has died, and the node is lost to
    all who use it; or if the reader needs something else first that this thread has to take in. A
    channel that is closed meanwhile ends the raylet. With one execution in flight no message ever
    comes to a buffer that is full; the price is that stages do not overlap.

    Source: Ray 2.60, ``src/ray/core_worker/experimental_mutable_object_provider.cc``,
    ``HandlePushMutableObject``: ``WriteAcquire`` in a ``RAY_CHECK``.

    Args:
        buffers: Of the graph.
        one_node: All ranks are on the driver's.
    """
    return buffers.number if one_node else min(buffers.number, _OVER_NODES)
