"""A Chrome trace of one rank's device thread, by torch's profiler; of steps only where there is no torch.

Open it in ``chrome://tracing`` or in Perfetto. Recording costs time: a profiled step is slower.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from aexec.errors import ConfigError

__all__ = ("RankProfiler",)


class _Recorder(Protocol):
    """What records."""

    def stop(self, path: Path) -> None:
        """Write the trace."""
        ...

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Mark what happens meanwhile."""
        ...


class RankProfiler:
    """Starts and stops traces of one rank.

    Args:
        rank: Whose.
        generation: Of its group.
        uses_torch: False: it runs a model without torch.
    """

    def __init__(self, rank: int, generation: int, *, uses_torch: bool) -> None:
        self._rank, self._generation, self._uses_torch = rank, generation, uses_torch
        self._recorder: _Recorder | None = None
        self._path = Path()
        self._count = 0

    def __repr__(self) -> str:
        return f"<RankProfiler rank {self._rank}: {'recording' if self._recorder else 'off'}, {self._count} traces>"

    def run(self, action: str, directory: str | None) -> str:
        """Start or stop; returns the path of the trace.

        Raises:
            ConfigError: The action is unknown, or comes out of turn.
        """
        if action == "start":
            return str(self.start(Path(directory or ".")))
        if action == "stop":
            return str(self.stop())
        raise ConfigError(f"action of profile is {action!r}: expected 'start' or 'stop'")

    def start(self, directory: Path) -> Path:
        """Begin to record.

        Raises:
            ConfigError: It records already, or the directory cannot be made.
        """
        if self._recorder is not None:
            raise ConfigError(f"profile start: rank {self._rank} records already, into {self._path}; stop it first")
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"profile start: {directory} cannot be made ({error.strerror})") from error
        self._path = directory.resolve() / f"trace-rank{self._rank}-generation{self._generation}-{self._count}.json"
        self._recorder = _TorchRecorder() if self._uses_torch else _SpanRecorder(self._rank)
        return self._path

    def stop(self) -> Path:
        """Write the trace.

        Raises:
            ConfigError: Nothing is recorded.
        """
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            raise ConfigError(f"profile stop: rank {self._rank} records nothing; profile('start') first")
        self._count += 1
        recorder.stop(self._path)
        return self._path

    def close(self) -> None:
        """End a recording that nobody stopped; its trace is written."""
        if self._recorder is not None:
            self.stop()

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Mark in the trace what happens meanwhile; costs nothing while none is recorded."""
        return _NOTHING if self._recorder is None else self._recorder.span(name)


_NOTHING: AbstractContextManager[Any] = nullcontext()


class _TorchRecorder:
    """torch's own profiler, CUDA included where there is one."""

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch
        profiler: Any = torch.profiler
        activities = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(profiler.ProfilerActivity.CUDA)
        self._profile: Any = profiler.profile(activities=activities)
        self._profile.start()

    def stop(self, path: Path) -> None:
        self._profile.stop()
        self._profile.export_chrome_trace(str(path))

    def span(self, name: str) -> AbstractContextManager[Any]:
        marked: AbstractContextManager[Any] = self._torch.profiler.record_function(name)
        return marked


class _Span:
    """One event of the trace."""

    __slots__ = ("_began", "_events", "_name")

    def __init__(self, name: str, events: list[tuple[str, float, float]]) -> None:
        self._name, self._events, self._began = name, events, 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._events.append((self._name, self._began, time.perf_counter()))


class _SpanRecorder:
    """Spans only."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._events: list[tuple[str, float, float]] = []

    def stop(self, path: Path) -> None:
        thread = threading.get_native_id()
        events = [
            {"name": name, "ph": "X", "ts": began * 1e6, "dur": (ended - began) * 1e6, "pid": self._rank, "tid": thread}
            for name, began, ended in self._events
        ]
        path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")

    def span(self, name: str) -> AbstractContextManager[None]:
        return _Span(name, self._events)
