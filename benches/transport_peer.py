"""The other process of `bench_transport.py`: echoes, over the transport or over what it is compared with."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from multiprocessing.connection import Connection
from typing import Any

from aexec.errors import ChannelClosed
from aexec.transport import BlockingChannel, Kind, Writer


def touch(value: Any) -> Any:
    """An answer to a message: small ones come back, of an array its ends."""
    return (int(value[0]), int(value[-1])) if hasattr(value, "dtype") else value


def over_transport(fd: int, spin: float) -> None:
    writer = Writer()
    channel = BlockingChannel(socket.socket(fileno=fd), writer, spin=spin)
    try:
        while True:
            frame = channel.receive()
            if frame is not None:
                channel.send(Kind.REPLY, frame.call, touch(frame.value))
            frame = None
    except ChannelClosed:
        channel.close()
        writer.close()


def over_pipe(fd: int) -> None:
    pipe = Connection(fd)
    try:
        while True:
            pipe.send(touch(pipe.recv()))
    except (EOFError, ConnectionError):
        pipe.close()


def over_raw_socket(fd: int) -> None:
    sock = socket.socket(fileno=fd)
    while data := sock.recv(1 << 16):
        sock.send(pickle.dumps(pickle.loads(data), 5))


if __name__ == "__main__":
    how, number, cpu, microseconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    if cpu >= 0:
        os.sched_setaffinity(0, {cpu})
    if how == "transport":
        over_transport(number, microseconds * 1e-6)
    else:
        {"pipe": over_pipe, "raw": over_raw_socket}[how](number)
