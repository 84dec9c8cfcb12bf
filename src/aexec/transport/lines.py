"""From one end of a line to the link that knows how to use it."""

from __future__ import annotations

import socket

from aexec.transport.links import Link, PacketLink, StreamLink

__all__ = ("link_of", "socket_link_of")


def socket_link_of(sock: socket.socket) -> PacketLink | StreamLink:
    """A socket's link.

    Raises:
        ValueError: It is of a kind that frames do not go through.
    """
    if sock.type == socket.SOCK_STREAM:
        return StreamLink(sock)
    if sock.type == getattr(socket, "SOCK_SEQPACKET", None):
        return PacketLink(sock)
    raise ValueError(f"{sock!r}: expected one end of seqpacket_pair(), stream_pair() or memory_pair()")


def link_of(end: socket.socket | Link) -> Link:
    """Any end's link.

    Raises:
        ValueError: It is of a kind that frames do not go through.
    """
    return socket_link_of(end) if isinstance(end, socket.socket) else end
