"""Where a thread is, seen from another one."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Container

__all__ = ("thread_stack",)


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
