"""What a driver and a worker process say to each other beside the messages of an executor.

A worker process has two lines to its driver, each a socket of its own. A process that we make
is started with one descriptor, the **work line** (``python -m aexec.worker <fd>``, or
:func:`aexec.worker.process.serve` in a child of a fork server). One that somebody else has made
comes for both of its lines to the driver's :class:`~aexec.transport.meeting.Meeting`, and gives
them to :func:`aexec.worker.process.serve_lines`. Who sends what, when:

1. driver, work line: ``LAUNCH`` with a :class:`Launch`, first of all and once. Where the process
   was started with the work line alone, the **control line** travels in its ``fds``, and it may
   be sent before the process has come to life.
2. worker, from then on: ``EVENT`` frames, with call 0, on either line: a
   :class:`PhaseReached` for each of :data:`PHASES`, in that order, :class:`ProgressMade` in
   between, and at most one :class:`Ended`, when the worker's own code ends the process
   (``sys.exit``); the process ends right after it, with that exit code.
3. driver, control line: ``MESSAGE`` with ``Greet``; its answer is the ``Hello``, once the
   worker class is constructed, or what went wrong with that. The process constructs by
   itself: whoever greets late loses no time.
4. driver, work line: ``MESSAGE`` with ``ExecuteModel``, ``SampleTokens``, both as one
   ``PairedStep``, which counts as two and has two calls, and ``CallMethod``
   of plain methods and callables, which run in this order. Control line: ``Ping``, ``Dump``,
   ``Revoke``, ``Shutdown``, and ``CallMethod`` of ``async def`` methods, with
   ``CallMethod.after`` set: the step messages that were sent to this rank before it.
5. worker: for each ``MESSAGE`` one answer under its call id, on either line: ``REPLY`` with
   the value, or ``FAILURE`` with a ``RemoteFailure`` (see ``aexec.worker.remote.rebuild``)
   or an ``AexecError``, which is raised as it is.
6. After ``Shutdown`` was answered with True the process ends by itself, with exit code 0;
   after False its main thread still works, and only force ends it. The process ends at
   once when either line is closed by the driver, or the driver has ended.

What the process writes to its standard error is text without a rank: the driver holds the
other end of that pipe, knows the rank, and puts it in front of each line.
"""

from __future__ import annotations

import msgspec

__all__ = ("PHASES", "Ended", "Launch", "PhaseReached", "ProgressMade")

#: What a worker process reports on its way; the hooks that the executor calls follow.
#: ``connected``: both lines are served. ``import``: the context, and with it the worker
#: class, is being unpickled. The others name the step that begins, but for the last.
PHASES = ("spawned", "connected", "import", "worker_init", "__init__", "constructed")


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker process has to know.

    Attributes:
        rank: Its rank; known before anything else can go wrong.
        local_world_size: Workers of the group on this node; they share its cores.
        driver_pid: The driver; when it ends, so does the worker. 0: by the lines alone it is to know,
            or, on the driver's node, by who made their other end.
        parent_pid: Whose child the worker is, if that is known: the driver, or its fork
            server. 0: not known.
        context: The ``WorkerContext`` by cloudpickle, without its ``progress``; it is
            unpickled once ``env`` and ``sys_path`` are in force.
        sys_path: The driver's ``sys.path``.
        env: Variables to set, or to remove (None), before anything is imported.
        cpus: Processors to run on; empty: as inherited. See ``aexec.worker.placement``.
        log_level: For ``aexec.observe.configure_logging``; empty: nothing is configured.
        log_format: Likewise: ``console`` or ``json``.
        spin: Seconds that the main thread polls its line before it sleeps.
        arena_bytes: Shared memory that it may use at most; see ``ExecutorConfig``.
    """

    rank: int
    local_world_size: int
    driver_pid: int
    parent_pid: int = 0
    context: bytes
    sys_path: tuple[str, ...] = ()
    env: dict[str, str | None] = {}
    cpus: tuple[int, ...] = ()
    log_level: str = ""
    log_format: str = ""
    spin: float = 0.0
    arena_bytes: int


class PhaseReached(msgspec.Struct, frozen=True):
    """The worker has come to ``phase``."""

    phase: str


class ProgressMade(msgspec.Struct, frozen=True):
    """``done`` of ``total`` units of a long phase are through; see ``WorkerContext.progress``."""

    phase: str
    done: float
    total: float


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """Worker code has ended the process, as ``sys.exit`` does.

    Attributes:
        exit_code: With which it ends now.
        phase: What the code was called for.
        step: The last step that was begun.
    """

    exit_code: int
    phase: str
    step: int | None = None
