"""The one thread of a worker on which its device is used.

Device work blocks and cannot be cancelled, so it never runs on an event loop: jobs go
to this thread first in, first out, and each result is posted back to the loop. What the
thread does right now can be read from outside at any time, without its help, which is
what health checks and stack dumps live on.

The thread is a daemon, and holds on to nothing while it is idle: a program that forgets
to close its executor ends, and the thread with it. Past its grace a job is ended by an
exception at its next line of Python, so a thread is left behind only while it is in C.

Before Python 3.14 a thread that comes back from a call of torch's into a dying interpreter
ends the process with SIGABRT. So at exit the thread is told to end, and interrupted after
half of :data:`EXIT_GRACE` seconds.

Source: github.com/pytorch/pytorch/issues/38228, github.com/python/cpython/issues/87135.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import anyio

from aexec.worker.stacks import thread_stack

__all__ = ("ComputeStatistics", "ComputeThread", "Job", "Pulse", "cancelled", "enter_inference_mode", "now_runs")

EXIT_GRACE = 1.0

Post = Callable[..., Any]  # post(function, *args) calls it on the loop, from any thread
Done = Callable[[Any, Exception | None], None]
Died = Callable[[BaseException, "Pulse"], None]


class Pulse(NamedTuple):
    """What the thread does at one moment.

    Attributes:
        phase: The label of the running job, ``idle`` without one.
        since: When that began, in seconds of ``time.monotonic``.
        step: The last step it began; None before the first.
    """

    phase: str
    since: float
    step: int | None


class ComputeStatistics(NamedTuple):
    """Figures of a compute thread.

    Attributes:
        phase: See :class:`Pulse`.
        age: Seconds since that phase began.
        step: See :class:`Pulse`.
        queued: Jobs that wait.
        done: Jobs that ran.
        busy_seconds: Seconds spent in jobs that ended.
    """

    phase: str
    age: float
    step: int | None
    queued: int
    done: int
    busy_seconds: float


class _Owner(NamedTuple):
    """The way back to the loop; it travels with each job, so that an idle thread holds none."""

    post: Post
    died: Died | None


class Job:
    """One piece of work; the first to claim it, the thread or :meth:`cancel`, has it."""

    __slots__ = ("_claim", "abandoned", "call", "done", "owner", "phase", "step")

    def __init__(self, phase: str, call: Callable[[], Any], done: Done, step: int | None, owner: _Owner) -> None:
        self.phase, self.call, self.done, self.step, self.owner = phase, call, done, step, owner
        self.abandoned = False
        self._claim = threading.Lock()

    def claim(self) -> bool:
        """True for the first caller only."""
        return self._claim.acquire(blocking=False)

    def cancel(self) -> bool:
        """True: it will never run. False: it has begun, and is told by :func:`cancelled`."""
        self.abandoned = True
        return self.claim()


class _Last(NamedTuple):
    """The end of the queue; ``ended`` is called on the loop once the thread is through."""

    post: Post
    ended: Callable[[], None]


class _Interrupted(SystemExit):
    """Ends a job in the midst of its Python; what ends a thread in this way is no news to ``threading.excepthook``."""


_running = threading.local()


def cancelled() -> bool:
    """True once nobody waits for the control call that runs on this thread: its caller is gone, or the executor closes.

    Long methods of a worker class may look at it now and then, and leave early.
    """
    job: Abandonable | None = getattr(_running, "job", None)
    return job is not None and job.abandoned


class Abandonable(Protocol):
    """What :func:`cancelled` asks."""

    @property
    def abandoned(self) -> bool:
        """True once nobody waits for it."""
        ...


def now_runs(job: Abandonable | None) -> None:
    """Say what this thread runs; for threads other than a :class:`ComputeThread`."""
    _running.job = job


class _Shared:
    """What the thread and its owner share; the thread knows nothing else of the owner."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Job | _Last | None] = queue.SimpleQueue()
        self.pulse = Pulse("idle", time.monotonic(), None)
        self.done = 0
        self.busy_seconds = 0.0
        self.inference = False


class ComputeThread:
    """Runs jobs one at a time, in order of submission.

    Args:
        name: Name of the thread, as in ``aexec-worker-0``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._shared = _Shared()
        self._thread: threading.Thread | None = None
        self._owner: _Owner | None = None
        self._end: anyio.Event | None = None

    def __repr__(self) -> str:
        figures = self.statistics()
        return f"<ComputeThread {self.name}: {figures.phase} for {figures.age:.1f} s, {figures.queued} queued>"

    def start(self, post: Post, died: Died | None = None) -> None:
        """Begin to work.

        Args:
            post: Calls a function with arguments on the loop; called from the thread.
            died: Called on the loop when a job ended the thread (``sys.exit`` and its like).
        """
        self._owner = _Owner(post, died)
        self._thread = threading.Thread(target=_work, args=(self._shared,), name=self.name, daemon=True)
        weakref.finalize(self, _release, self._shared.jobs, self._thread)
        self._thread.start()

    def allow_inference_mode(self) -> None:
        """From the next job on, work under ``torch.inference_mode`` once torch is loaded."""
        self._shared.inference = True

    def submit(self, phase: str, call: Callable[[], Any], done: Done, step: int | None = None) -> Job:
        """Queue ``call``; ``done(value, None)`` or ``done(None, error)`` follows on the loop."""
        if self._owner is None:
            raise RuntimeError(f"{self.name} was not started")
        job = Job(phase, call, done, step, self._owner)
        self._shared.jobs.put(job)
        return job

    @property
    def is_alive(self) -> bool:
        """True while the thread takes jobs, or works on its last."""
        ended = self._end is not None and self._end.is_set()
        return self._thread is not None and not ended and self._thread.is_alive()

    @property
    def pulse(self) -> Pulse:
        """What the thread does now."""
        return self._shared.pulse

    def statistics(self) -> ComputeStatistics:
        """The figures so far."""
        shared = self._shared
        phase, since, step = shared.pulse
        age = time.monotonic() - since
        return ComputeStatistics(phase, age, step, shared.jobs.qsize(), shared.done, shared.busy_seconds)

    def stack(self) -> str:
        """Where the thread is now, innermost frame last."""
        ident = None if self._thread is None else self._thread.ident
        return thread_stack(self.name, ident, self.pulse.phase, (__file__,))

    def discard_queued(self) -> int:
        """Forget the jobs that have not begun; returns how many."""
        discarded = 0
        with contextlib.suppress(queue.Empty):
            while True:
                self._shared.jobs.get_nowait()
                discarded += 1
        return discarded

    async def close(self, grace: float) -> bool:
        """End after the jobs that are queued; False: it still worked after ``grace`` seconds, and was interrupted.

        A thread cannot be killed: one that is in C, as in a collective, is left behind, and ends when it comes back.
        """
        if self._owner is None or not self.is_alive:
            return True
        if self._end is None:
            self._end = anyio.Event()
            self._shared.jobs.put(_Last(self._owner.post, self._end.set))
        with anyio.move_on_after(grace):
            await self._end.wait()
        if self.is_alive and self._thread is not None:
            _interrupt(self._thread)
            return False
        return True


def _work(shared: _Shared) -> None:
    with contextlib.ExitStack() as guard:
        last = _run_all(shared, guard)
    if last is not None:
        _post_quietly(last.post, last.ended)


def _run_all(shared: _Shared, guard: contextlib.ExitStack) -> _Last | None:
    dead = False
    while isinstance(job := shared.jobs.get(), Job):
        if not dead and job.claim():
            if shared.inference and enter_inference_mode(guard):
                shared.inference = False
            dead = _run(shared, job)
        del job
    return job


def _run(shared: _Shared, job: Job) -> bool:
    """Run one job; True: it has ended the thread, or was ended with it."""
    began = time.monotonic()
    step = shared.pulse.step if job.step is None else job.step
    shared.pulse = Pulse(job.phase, began, step)
    _running.job = job
    value: Any = None
    error: Exception | None = None
    interrupted = False
    try:
        value = job.call()
    except Exception as raised:  # noqa: BLE001 - it belongs to whoever asked
        error = raised
    except _Interrupted:
        interrupted, error = True, TimeoutError(f"{job.phase} took longer than the grace of its thread's end")
    except BaseException as raised:  # noqa: BLE001 - the thread ends, legibly
        if job.owner.died is not None:
            _post_quietly(job.owner.post, job.owner.died, raised, shared.pulse)
        return True
    finally:
        _running.job = None
    now = time.monotonic()
    shared.busy_seconds += now - began
    shared.done += 1
    shared.pulse = Pulse("idle", now, step)
    _post_quietly(job.owner.post, job.done, value, error)
    error = None  # its traceback holds this frame: no cycle, or tensors outlive the call
    return interrupted


def enter_inference_mode(guard: contextlib.ExitStack) -> bool:
    """Under ``torch.inference_mode`` for as long as ``guard`` is open; False: torch is not loaded.

    This module never imports torch.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    mode = getattr(torch, "inference_mode", None)
    if mode is not None:
        guard.enter_context(mode())
    return mode is not None


def _post_quietly(post: Post, function: Callable[..., Any], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody is left to be told
        post(function, *args)


def _interrupt(thread: threading.Thread) -> None:
    """Raise in another thread, at its next line of Python."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Interrupted))


def _release(jobs: queue.SimpleQueue[Job | _Last | None], thread: threading.Thread) -> None:
    jobs.put(None)
    exiting = not threading.main_thread().is_alive()
    if not exiting or thread is threading.current_thread():
        return
    thread.join(EXIT_GRACE / 2)
    if thread.is_alive():
        _interrupt(thread)
        thread.join(EXIT_GRACE / 2)
