"""Processes at the other end of a channel."""

from __future__ import annotations

import socket
import sys
from typing import Any

from aexec.errors import AexecError, ChannelClosed
from aexec.transport import BlockingChannel, Kind, Writer


def serve(channel: BlockingChannel) -> None:
    """Answer what is asked; ``keep`` keeps what came along."""
    kept: list[Any] = []
    while True:
        frame = channel.receive()
        if frame is None:
            continue
        try:
            channel.send(Kind.REPLY, frame.call, answer(frame.value, kept))
        except AexecError as error:
            if isinstance(error, ChannelClosed):
                raise
            channel.send(Kind.FAILURE, frame.call, str(error))
        del frame


def answer(value: Any, kept: list[Any]) -> Any:
    """What is asked for, and what it is asked of."""
    word, content = value
    if word == "keep":
        kept.append(content)
        return len(kept)
    if word == "drop":
        kept.clear()
        return 0
    if word == "sum":
        return content.sum()
    if word == "make":
        import numpy as np

        return np.full(content, 5, np.uint8)
    if word == "lock":
        import threading

        return threading.Lock()
    return content


def main() -> None:
    """Serve the descriptor that the command line names."""
    channel = BlockingChannel(socket.socket(fileno=int(sys.argv[1])), Writer(), spin=float(sys.argv[2]))
    try:
        serve(channel)
    except ChannelClosed:
        channel.close()


if __name__ == "__main__":
    main()
