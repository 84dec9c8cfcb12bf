"""Tensors that go from one thread to another, where each thread has a CUDA stream of its own.

A thread that hands a tensor on has only queued the work that makes it. On a CPU there is
nothing to say about that: what is there is done.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ("arrived", "computed")


def computed(tensor: Any) -> Callable[[], None] | None:
    """Mark where the work ends that makes ``tensor``; on the thread that has queued it.

    Returns:
        To be called on the thread that goes on with it: its stream waits for that work, no
        thread does, and the memory is not used again before both streams are through with it.
        None: the tensor is there.
    """
    if tensor.device.type != "cuda":
        return None
    cuda: Any = sys.modules["torch"].cuda
    done = cuda.Event()
    done.record(cuda.current_stream(tensor.device))

    def follow() -> None:
        stream = cuda.current_stream(tensor.device)
        stream.wait_event(done)
        tensor.record_stream(stream)

    return follow


def arrived(tensor: Any) -> None:
    """Wait until this thread's stream has received ``tensor``.

    NCCL only queues a receipt, on the stream of the thread that asks for it; the thread that
    uses the tensor next has another stream, which knows nothing of that.
    """
    if tensor.device.type == "cuda":
        sys.modules["torch"].cuda.current_stream(tensor.device).synchronize()
