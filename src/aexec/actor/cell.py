"""The life around one actor: starts it, lets it serve, and ends it properly.

An end takes these steps, whatever brought it about: the mailbox is closed and all that
is in it is answered; handlers that run may finish until the time to stop is up (not when
the actor failed); children end; ``on_stop`` runs; replies still owed are answered. Who
waits for the end is told last.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from aexec.actor.core import Core
from aexec.actor.deadlines import Timer
from aexec.actor.envelope import Origin, here
from aexec.actor.events import Exited, Spawned
from aexec.actor.lifecycle import ALIVE, OVER, TRANSITIONS, Exit, LifecycleEvent, LifecycleState
from aexec.actor.logs import logger
from aexec.actor.observed import Observed
from aexec.actor.runtime import Interrupted, Promise, Section, start_in
from aexec.actor.statistics import ActorStatistics
from aexec.actor.supervision import Supervision, Trouble
from aexec.actor.ward import Hosted
from aexec.errors import note

__all__ = ("Cell", "Hosted")

STUBBORN = 1.0  # seconds between two attempts to cut short what does not want to end


class Cell(Observed):
    """One actor's place in its system.

    Args:
        core: What the actors of the system share.
        name: The actor's name.
        bound: Bound of its mailbox.
        parent: The actor that spawned it; None: the system.
        supervision: How it is supervised; None: not in particular.
        make: Constructs the actor, once for each incarnation.

    Attributes:
        children: Actors that it spawned, by name, eldest first.
        owned: Its own tasks, by their sections; cancelled when it ends.
    """

    __slots__ = (
        "_make",
        "_quiet",
        "_stop_at",
        "_stop_timer",
        "_task",
        "children",
        "owned",
    )

    def __init__(
        self,
        core: Core,
        name: str,
        bound: int,
        parent: Cell | None,
        supervision: Supervision | None,
        make: Callable[[], Hosted],
    ) -> None:
        super().__init__(core, name, bound, parent, supervision)
        self._make = make
        self.children: dict[str, Cell] | None = None
        self.owned: dict[Section, object] | None = None
        self._task: object = None
        self._quiet: Promise[None] | None = None
        self._stop_at: float | None = None
        self._stop_timer: Timer | None = None

    def __repr__(self) -> str:
        return f"<Cell {self.mailbox.describe(self.state.value)}>"

    def statistics(self) -> ActorStatistics:
        """Its figures."""
        oldest = self.mailbox.oldest()
        return ActorStatistics(
            name=self.name,
            state=self.state.value,
            generation=self.generation,
            restarts=self.generation - 1,
            mailbox=self.mailbox.statistics(),
            in_hand=self.in_hand,
            deferred=len(self.owed or ()),
            handled=self.handled,
            failed=self.failed,
            cancelled=self.cancelled,
            busy_seconds=self.busy_seconds,
            oldest_seconds=0.0 if oldest is None else self.core.runtime.now() - oldest,
        )

    # ------------------------------------------------------------ its start

    async def start(self) -> None:
        """Start it; returns after ``on_start``.

        Raises:
            Exception: What its constructor or ``on_start`` raised, or the loop, which made no task for it.
        """
        now, started = here.get(), self.core.runtime.promise()
        callers, deadline = ((), None) if now is None else (now.callers, now.deadline)
        self.core.register(self)
        if isinstance(self.parent, Cell):
            self.parent.adopt(self)
        life = self._live(started, Origin(self, (*callers, self.address), deadline))
        try:
            self._task = self.core.runtime.start(life, self.name)
        except Exception as error:  # noqa: BLE001 - the loop makes no task; it is raised below
            life.close()
            self.broke(error)
            self._be_over(started)
        try:
            await started
        except BaseException:  # when the spawner was cancelled, nobody has the ref
            self.request_stop("its spawner was cancelled", self.core.runtime.now())
            raise

    def adopt(self, child: Cell) -> None:
        """Take note of a child."""
        if self.children is None:
            self.children = {}
        self.children[child.name] = child

    async def _live(self, started: Promise[None], origin: Origin) -> None:
        thrown: BaseException | None = None
        has_begun = False
        try:
            here.set(origin)
            has_begun = await self._begin_first(started)
            while has_begun and self.exit is None:
                await self.serve()
                if self.exit is None:
                    has_begun = await self.supervised()
        except Interrupted:
            has_begun = False  # its time to stop was up while it started again
        except GeneratorExit:  # the loop is gone, and nothing can be awaited
            raise
        except BaseException as error:  # noqa: BLE001 - it goes on below, when the actor has ended
            self.broke(error)
            thrown = error
        try:
            with self.core.runtime.shield():
                await self.wind_down(None, has_begun=has_begun and self.actor is not None)
        finally:
            self._be_over(started)
        if thrown is not None:
            raise thrown

    async def _begin_first(self, started: Promise[None]) -> bool:
        """Begin the first incarnation; False: it refused, or was told to stop meanwhile."""
        try:
            error = await self.begin()
        except Interrupted:
            return False
        if error is not None:
            self.fail(Exit("failed", f"it could not start: {type(error).__name__}: {error}", error))
            return False
        if self.state is LifecycleState.STARTING:
            self._move(LifecycleEvent.STARTED)
        if not started.done():
            started.set_result(None)
        if self.core.events is not None:
            self.core.events.emit(Spawned(actor=self.name, parent=None if self.parent is None else self.parent.name))
        return True

    async def begin(self) -> Exception | None:
        """Construct the actor and let it start.

        Returns:
            What its constructor or ``on_start`` raised.

        Raises:
            Interrupted: It was cut short.
        """
        if self.generation > 1:  # the first time, it is its spawner who waits for it
            here.set(Origin(self, (self.address,)))
        try:
            self.actor = actor = self._make()
            self.table = self.table.renew(actor.__handlers__)
            actor.__attach__(self)
            if self.table.starts:
                await self.section().run(actor.on_start())
        except Interrupted:
            raise
        except Exception as error:  # noqa: BLE001 - it goes to the spawner or the supervisor
            note(error, f"raised while actor {self.name} started")
            return error
        return None

    @property
    def kind(self) -> str:
        """The actor's class; what makes it while there is none."""
        make: object = self._make if self.actor is None else self.actor.__class__
        return str(getattr(getattr(make, "func", make), "__name__", "actor"))

    def siblings(self) -> list[Cell]:
        """All that its parent has spawned and that are not over, itself included, eldest first."""
        if isinstance(self.parent, Cell):
            return list((self.parent.children or {}).values())
        return [cell for cell in self.core.cells.values() if cell.parent is None]

    # ------------------------------------------------------------ its end

    def request_stop(self, reason: str, by: float | None) -> None:
        """Let it stop.

        Args:
            reason: Why, in words.
            by: What still runs then is cut short, in monotonic seconds; None: never.
        """
        if self.state in ALIVE:
            self._move(LifecycleEvent.STOP)
            self._announce(Exit("stopped", reason))
        if self.state not in OVER:
            self._stop_by(by)

    def broke(self, error: BaseException) -> None:
        """It cannot go on."""
        if isinstance(error, self.core.runtime.cancelled):
            self.fail(Exit("killed", "its task was cancelled from outside"))
        else:
            self.fail(Exit("failed", f"{type(error).__name__}: {error}", error))

    def own(self, coroutine: Coroutine[Any, Any, Any], what: str) -> Section:
        """Run a task that is the actor's: it ends with it, and takes it along when it fails.

        Raises:
            ActorDied: It has ended, or ends.
            Exception: The loop does not make a task.
        """
        if self.exit is not None:
            coroutine.close()
            raise self.exit.as_error(self.name)
        if self.owned is None:
            self.owned = {}
        section = self.core.runtime.section()
        start_in(self.owned, self.core.runtime, self._run_owned, coroutine, section, f"{self.name}/{what}")
        return section

    def side_ended(self) -> None:
        """One of the tasks beside the serving task has ended."""
        if self._quiet is not None and not self.sides and not self.owned and not self._quiet.done():
            self._quiet.set_result(None)

    async def _run_owned(self, coroutine: Coroutine[Any, Any, Any], section: Section) -> None:
        here.set(Origin(self))
        try:
            await section.run(coroutine)
        except Interrupted:
            pass
        except Exception as error:  # noqa: BLE001 - its supervisor decides
            self.judge(error, Trouble.TASK)
        except BaseException as error:
            self.broke(error)
            raise
        finally:
            assert self.owned is not None
            del self.owned[section]
            self.side_ended()

    def fail(self, exit_: Exit) -> None:
        """End it as failed."""
        if LifecycleEvent.FAIL not in TRANSITIONS[self.state]:
            return  # it has failed already
        self._move(LifecycleEvent.FAIL)
        self._announce(exit_)
        self._cut_short()
        self._stop_by(self.core.runtime.now() + self.core.stop_timeout)

    def _announce(self, exit_: Exit) -> None:
        """From now on it takes no messages; those in the mailbox are answered at once."""
        self.exit = exit_
        for envelope in self.mailbox.clear():
            reply, admitted = envelope.reply, envelope.admitted
            self._drop(envelope, "closed")
            if reply is not None and not reply.done():
                reply.set_exception(exit_.as_error(self.name))
            if admitted is not None and not admitted.done():
                admitted.set_result(None)
        self.mailbox.signal(exit_)
        self.wake()

    def _stop_by(self, by: float | None) -> None:
        if by is None or (self._stop_at is not None and self._stop_at <= by):
            return
        self._stop_at = by
        if self._stop_timer is not None:
            self._stop_timer.cancel()
        self._stop_timer = self.core.deadlines.call_at(by, self._kill)

    def _kill(self) -> None:
        """Its time to stop is up."""
        runs = self.sides or self.owned or (self._section is not None and self._section.active)
        if runs and self.exit is not None and self.exit.kind == "stopped":
            self.exit = Exit("killed", "its time to stop was up, and a handler or task of it still ran")
        self._cut_short()
        self._stop_timer = self.core.deadlines.call_at(self.core.runtime.now() + STUBBORN, self._kill)

    def cut_short_again(self) -> None:
        """Cut short what runs, and again if it does not want to end."""
        self._cut_short()
        self._stop_timer = self.core.deadlines.call_at(self.core.runtime.now() + STUBBORN, self._kill)

    def _cut_short(self) -> None:
        if self._section is not None and self._section.active:
            self._section.interrupt()
        for section in (*self.sides, *(self.owned or ())):
            section.interrupt()

    async def wind_down(self, exit_: Exit | None, *, has_begun: bool) -> None:
        """End an incarnation: its tasks, its children, ``on_stop`` if it had begun.

        Args:
            exit_: Why it ends; None: as the actor does, for a reason that may yet change.
            has_begun: ``on_start`` returned.
        """
        for section in self.owned or ():
            section.interrupt()
        while self.sides or self.owned:
            self._quiet = self.core.runtime.promise()
            await self._quiet
        children = list((self.children or {}).values())
        for child in reversed(children):
            child.request_stop(f"its parent {self.name} ended", self._stop_at)
        for child in children:
            await child.closed()
        if has_begun and self.table.stops:
            exit_ = exit_ or self.exit
            assert exit_ is not None
            await self._run_on_stop(exit_)
        self.forget_all()  # whom the next incarnation wants to watch, it watches itself
        if self.exit is None and self._stop_timer is not None:
            self._stop_timer.cancel()
            self._stop_timer = None

    async def _run_on_stop(self, exit_: Exit) -> None:
        """In a section of its own, which the end of its time to stop does not cut short."""
        core, section = self.core, self.core.runtime.section()
        timer = core.deadlines.call_at(core.runtime.now() + core.stop_timeout, section.interrupt)
        here.set(Origin(self, (self.address,)))
        try:
            await section.run(self.actor.on_stop(exit_))
        except Interrupted:
            logger(actor=self.name).warning("on_stop was cut short", seconds=core.stop_timeout)
        except Exception:  # noqa: BLE001 - the end goes on
            logger(actor=self.name).exception("on_stop failed")
        finally:
            timer.cancel()

    def _be_over(self, started: Promise[None]) -> None:
        """Tell all who wait for anything of it; holds on to nothing afterwards."""
        exit_ = self.exit
        assert exit_ is not None
        for envelope in list(self.owed or ()):
            self.reject(envelope, exit_.as_error(self.name))
        self._move(LifecycleEvent.ENDED)
        if self._stop_timer is not None:
            self._stop_timer.cancel()
        self.core.cells.pop(self.name, None)
        if isinstance(self.parent, Cell) and self.parent.children is not None:
            self.parent.children.pop(self.name, None)
        self._tell_of_end(exit_, started)
        self.actor = self._task = self._section = self.mailbox.signals = None

    def _tell_of_end(self, exit_: Exit, started: Promise[None]) -> None:
        if not started.done():
            error = exit_.error
            started.set_exception(error if isinstance(error, Exception) else exit_.as_error(self.name))
        elif not started.cancelled():
            if exit_.kind == "failed":
                logger(actor=self.name).error("actor failed", reason=exit_.reason, exc_info=exit_.error)
            if self.core.events is not None:
                self.core.events.emit(Exited(actor=self.name, how=exit_.kind, reason=exit_.reason))
        self.forget_all()
        self.tell_of_end(exit_)
