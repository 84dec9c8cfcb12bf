"""pyzmq, where it is installed."""

from __future__ import annotations

import importlib.util

from aexec.errors import MissingExtra

__all__ = ("check_installed",)


def check_installed() -> None:
    """Nothing, if lines between nodes can be had here; it is not imported for that.

    Raises:
        MissingExtra: It is not installed; names the command.
    """
    if importlib.util.find_spec("zmq") is None:
        raise MissingExtra("a line between nodes", "multinode", "pyzmq")
