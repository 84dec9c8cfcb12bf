"""Where a thread is, seen from another one, and where a coroutine is."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Container
from typing import Any

__all__ = ("awaited_frames", "thread_stack")

_AWAITS = {"cr": "cr_await", "gi": "gi_yieldfrom", "ag": "ag_await"}


def thread_stack(name: str, ident: int | None, phase: str, ours: Container[str]) -> str:
    """The stack of a thread, innermost frame last, without the frames that led to its work.

    Args:
        name: Of the thread.
        ident: Of the thread; None: it was not started.
        phase: What it does; nothing is shown of a thread that is ``idle``.
        ours: Files whose frames, and all before them, are left out.
    """
    frame = None if ident is None else sys._current_frames().get(ident)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - documented, in spite of its name
    if frame is None:
        return f"thread {name} is not running\n"
    if phase == "idle":
        return f"thread {name} is idle\n"
    frames = traceback.extract_stack(frame)
    last = max((place for place, entry in enumerate(frames) if entry.filename in ours), default=-1)
    return f"thread {name}, in {phase}:\n" + "".join(traceback.format_list(frames[last + 1 :]))


def awaited_frames(awaitable: Any) -> list[traceback.FrameSummary]:
    """Where a suspended coroutine and all that it awaits stand, innermost last; empty for what has no frame, as a future."""
    frames: list[traceback.FrameSummary] = []
    while kind := next((kind for kind in _AWAITS if hasattr(awaitable, f"{kind}_frame")), None):
        frame = getattr(awaitable, f"{kind}_frame")
        if frame is None:  # it has ended
            break
        frames += traceback.StackSummary.extract([(frame, frame.f_lineno)])
        awaitable = getattr(awaitable, _AWAITS[kind])
    return frames
