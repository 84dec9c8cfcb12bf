"""What the leader of several nodes and a node's agent say to each other.

The leader is the node where the executor lives, node 0. On each other node an agent has the
ranks of that node as ``mp`` has all of its ranks; the line between the two carries what a
worker group and its sink are made of. In this order:

1. The line is there, and both ends have proved that they know the key of the nodes. Nothing
   has been unpickled, and nothing is before both agree in 2.
2. agent: a :class:`Join`; leader: :class:`Welcome` or :class:`Refused`, after which the line is
   closed. All three are msgpack (:func:`packed`, :func:`unpacked`): plain values, which run no code.
3. leader, for each generation: ``EVENT`` with :class:`Begin`, once the generation before has
   :class:`Stopped`. agent: :class:`PhaseReached` and :class:`ProgressMade` of ranks, then
   :class:`Begun` or :class:`NotBegun`.
4. leader: ``MESSAGE`` under the call's id, with the message itself if it is for all ranks of
   the node, else with a :class:`Chosen`. It travels once, whatever the number of ranks.
5. agent: ``REPLY`` with :class:`Answers`: those of one turn of the loop are one frame, under
   call 0, as far as they are plain; any other has a frame of its own, under its call's id, so that one
   that cannot be decoded fails its own call. ``FAILURE`` with a :class:`Failed` at once, under its call's id.
6. agent: ``EVENT`` with :class:`Died` for a rank that has ended without being told to.
7. leader: :class:`Stop`, at any time after :class:`Begin`; agent: :class:`Stopped`, once for each.
8. leader: :class:`Dismissed`, when no generation follows: the agent ends, with exit code 0. agent:
   :class:`Leaving`, when it is told on its own node to end: its ranks are lost.

A line that breaks without either of the two is a loss: of the node for the leader, which says of
each of its ranks that it has died; of the leader for the agent, which ends its workers and itself.

What is about a generation carries its number; calls have ids that no other generation uses.
No clock is compared with another node's: every limit is counted where it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from aexec.errors import AexecError, ProtocolError, WorkerDied
from aexec.messages.base import Message
from aexec.messages.control import Hello

__all__ = (
    "WIRE_VERSION",
    "Answer",
    "Answers",
    "Begin",
    "Begun",
    "Chosen",
    "Died",
    "Dismissed",
    "Failed",
    "Join",
    "Leaving",
    "NotBegun",
    "RankPhase",
    "RankProgress",
    "Refused",
    "Stop",
    "Stopped",
    "Welcome",
    "packed",
    "unpacked",
)

WIRE_VERSION = 1  #: Of all that is described here; two nodes that differ do not work together.


# The handshake: plain, and msgpack only.


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """A node that wants to take part.

    Attributes:
        wire: Its :data:`WIRE_VERSION`.
        aexec: Its version of aexec.
        python: Its version of Python, as in ``3.11``; pickles and code objects are made for one.
        node_rank: Which node it is, from 1.
        nnodes: How many it was told that there are.
        host: Its name, for people.
        address: Its address, by which other nodes reach it.
        pid: Of its agent.
        devices: The devices that its ranks can see, by number or UUID.
        cpus: CPUs that its ranks may use.
    """

    wire: int
    aexec: str
    python: str
    node_rank: int
    nnodes: int
    host: str
    address: str
    pid: int
    devices: tuple[str, ...] = ()
    cpus: int = 0


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The node takes part from here on; what comes next may be pickled.

    Attributes:
        host: The leader's node, for people.
        pid: Of the leader.
        world_size: Ranks of the group.
        node_timeout: Seconds without a sign of life after which either end counts as lost.
    """

    host: str
    pid: int
    world_size: int
    node_timeout: float


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The node does not take part.

    Attributes:
        why: In words that say what to change; they are shown on both nodes.
    """

    why: str


def packed(said: Join | Welcome | Refused) -> bytes:
    """A part of the handshake, as it travels."""
    return msgspec.msgpack.encode(said)


def unpacked(data: Any) -> Join | Welcome | Refused:
    """Read a part of the handshake.

    Raises:
        ProtocolError: It is something else.
    """
    try:
        said: Join | Welcome | Refused = _read_handshake(data)
    except msgspec.MsgspecError as error:
        text = bytes(data[:64])
        raise ProtocolError(f"the handshake of nodes has {text!r}, which is not what it should be: {error}") from error
    return said


_read_handshake = msgspec.msgpack.Decoder(Join | Welcome | Refused).decode


# A generation.


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """Start a generation of this node's ranks.

    Attributes:
        generation: Its number, from 1.
        config: The executor's settings, by cloudpickle.
        first_rank: Of this node's ranks, which follow each other.
        num_ranks: How many.
        node_id: Names the node; no other node of the group has the same.
        init_method: Where ``torch.distributed`` meets, as in ``tcp://10.0.0.5:40123``.
        secret: What ranks prove to each other that they belong together; see ``WorkerContext.group_secret``.
        sys_path: The leader's ``sys.path``, as far as it exists here.
        arena_bytes: The largest message to the leader; see ``ExecutorConfig``.
    """

    generation: int
    config: bytes
    first_rank: int
    num_ranks: int
    node_id: str
    init_method: str
    secret: bytes = b""
    sys_path: tuple[str, ...] = ()
    arena_bytes: int


class RankPhase(msgspec.Struct, frozen=True):
    """A rank that is starting has come to ``phase``; see ``GroupSink.phase``."""

    generation: int
    rank: int
    phase: str


class RankProgress(msgspec.Struct, frozen=True):
    """See ``GroupSink.progress``."""

    generation: int
    rank: int
    phase: str
    done: float
    total: float


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks of the node have their worker constructed.

    Attributes:
        generation: Of them.
        hellos: What they say, in rank order.
        devices: Of each, in the same order, as in ``cuda:0`` or ``auto``.
        settings: What the node chose where a setting left it the choice.
        environment: What its workers have that its agent has not.
    """

    generation: int
    hellos: Sequence[Hello]
    devices: Sequence[str] = ()
    settings: dict[str, Any] = {}
    environment: dict[str, str] = {}


class NotBegun(msgspec.Struct, frozen=True, kw_only=True):
    """They could not be started; nothing of them is left after the :class:`Stop` that follows.

    Attributes:
        generation: Of them.
        error: Why, with what became of the node's other ranks as notes.
        notes: Of the error, which do not travel with all of them.
    """

    generation: int
    error: AexecError
    notes: Sequence[str] = ()


class Died(msgspec.Struct, frozen=True, kw_only=True):
    """A rank has ended without being told to; its node is in the error."""

    generation: int
    error: WorkerDied


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """End all ranks of the node; see ``WorkerGroup.stop``.

    Attributes:
        generation: Of them.
        grace: Seconds for running work and ``shutdown`` hooks.
    """

    generation: int
    grace: float


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """They have ended.

    Attributes:
        generation: Of them.
        lines: A line on each worker that did not end by itself.
    """

    generation: int
    lines: Sequence[str] = ()


# Calls.


class Chosen(msgspec.Struct, frozen=True):
    """A message for some ranks of the node."""

    ranks: Sequence[int]
    message: Message[Any]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has answered to a call."""

    call: int
    rank: int
    value: Any


class Answers(msgspec.Struct, frozen=True):
    """What ranks have answered, in the order in which it came."""

    answers: Sequence[Answer]


class Failed(msgspec.Struct, frozen=True):
    """A rank has answered a call with an error; see ``GroupSink.failed``.

    Attributes:
        rank: Which; -1: all ranks of the node that the call went to and that have not answered.
        error: It: an ``AexecError``, or a ``aexec.worker.remote.RemoteFailure``.
        notes: Its notes, which do not travel with all errors.
    """

    rank: int
    error: Any
    notes: Sequence[str] = ()


# The end.


class Leaving(msgspec.Struct, frozen=True):
    """The agent was told on its own node to end; its workers end with it.

    Attributes:
        why: As in ``SIGTERM`` or ``Ctrl-C``.
    """

    why: str


class Dismissed(msgspec.Struct, frozen=True):
    """The executor is closed, or has given up: the agent is not needed any longer.

    Attributes:
        why: In words.
        orderly: The agent's exit code is 0; False: the executor has failed for good, and it is not.
    """

    why: str
    orderly: bool = True
