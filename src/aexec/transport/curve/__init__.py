"""The line between two nodes: encrypted, and open to nobody but who has the key of the nodes.

::

    listener = CurveListener("10.0.0.5", 29501, key, on_hello, on_link)  # the leader
    listener.open()

    answer, link = await dial_leader("10.0.0.5", 29501, key, b"hello", timeout=60.0)  # each follower

It is ZMQ with its CURVE mechanism: a ROUTER at the leader, bound to one address, and a DEALER at
each follower. A peer is heard once CURVE has shown that it knows the key (a :class:`NodeKey`) and
its address is allowed; then it says hello, in plain bytes, and is accepted or not. From there on
the line carries the frames of a ``LoopChannel``, which may be pickled.

ZMQ's own thread sends and receives, encrypts, and exchanges heart-beats: a loop that is blocked is no
death. On the loop there is no task, no thread of ours, and nothing that polls.

pyzmq, which the extra ``multinode`` brings, is loaded when the first line is opened.
"""

from __future__ import annotations

from aexec.transport.curve.dialer import dial_leader as dial_leader
from aexec.transport.curve.key import NodeKey as NodeKey
from aexec.transport.curve.library import check_installed as check_installed
from aexec.transport.curve.link import NodeLink as NodeLink
from aexec.transport.curve.link import broadcast as broadcast
from aexec.transport.curve.listener import CurveListener as CurveListener
from aexec.transport.curve.listener import ListenerStatistics as ListenerStatistics
from aexec.transport.curve.pair import curve_pair as curve_pair

__all__ = (
    "CurveListener",
    "ListenerStatistics",
    "NodeKey",
    "NodeLink",
    "broadcast",
    "check_installed",
    "curve_pair",
    "dial_leader",
)
