"""An actor under supervision: from a failure to what its supervisor makes of it.

A failure is judged at once where it happens, by the parent, so that no handler of either
has to end first. Only an async ``on_child_failed`` takes time: meanwhile the actor is
suspended. A restart is acted out by the serving task: it ends the incarnation, waits for
the back-off and its turn, and begins the next one; messages wait in the mailbox.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ClassVar, Protocol, TypeVar

from aexec.actor.core import Core
from aexec.actor.desk import Desk
from aexec.actor.envelope import Envelope, Origin, here
from aexec.actor.events import Escalated, Restarted
from aexec.actor.lifecycle import TRANSITIONS, Exit, LifecycleEvent, LifecycleState
from aexec.actor.logs import logger
from aexec.actor.rounds import Round
from aexec.actor.runtime import Interrupted, Section
from aexec.actor.supervision import Budget, Directive, Supervision, Trouble, affected, choose, delay_before
from aexec.actor.table import HandlerTable
from aexec.errors import ActorError, ActorRestarted, RestartsExhausted

__all__ = ("Hosted", "Verdict", "Ward")

Verdict = Directive | None

W = TypeVar("W", bound="Ward")

_DEFAULT = Supervision()
_SERVING = frozenset({LifecycleState.RUNNING, LifecycleState.SUSPENDED})


class Hosted(Protocol):
    """What a cell needs of an actor: ``actor.Actor``."""

    __handlers__: ClassVar[HandlerTable]
    supervision: ClassVar[Supervision | None]

    def __attach__(self, cell: Any, /) -> None:
        """It has come to live in ``cell``."""
        ...

    def __judge__(self, child: Any, error: BaseException, /) -> Verdict | Awaitable[Verdict]:
        """What to do about a child that failed."""
        ...

    async def on_start(self) -> None:
        """Before the first message."""
        ...

    async def on_stop(self, reason: Exit, /) -> None:
        """After the last message."""
        ...


class Ward(Desk):
    """One actor under supervision; ``cell.Cell`` adds its beginning and its end.

    Attributes:
        parent: The actor that spawned it, which supervises it; None: the system does.
        supervision: How; None: as ``supervision.UNSUPERVISED`` says.
    """

    __slots__ = ("_budget", "_queue", "_round", "parent", "supervision")

    def __init__(self, core: Core, name: str, bound: int, parent: Ward | None, supervision: Supervision | None) -> None:
        super().__init__(core, name, bound)
        self.parent, self.supervision = parent, supervision
        self._budget: Budget | None = None
        self._round: Round | None = None
        self._queue: list[tuple[BaseException, Trouble]] | None = None  # failures to be judged yet

    # ------------------------------------------------------------ judged

    def on_tell_failure(self, envelope: Envelope, error: Exception) -> None:
        """Nobody waits for a tell, so the log and the supervisor are told."""
        logger(actor=self.name).error("handler failed", message=envelope.handler.kind.__name__, exc_info=error)
        self.judge(error, Trouble.MESSAGE)

    def on_fatal(self, error: BaseException) -> None:
        """End at once, and whom else its group's strategy takes along; nobody is asked."""
        self._stop_group(error)

    def judge(self, error: BaseException, trouble: Trouble) -> None:
        """Let the supervisor decide about a failure, and act on it."""
        if self._queue is not None:
            self._queue.append((error, trouble))
        elif self.state in _SERVING or trouble is Trouble.START:
            verdict = self._ask_supervisor(error)
            if inspect.isawaitable(verdict):
                self._suspend(verdict, error, trouble)
            else:
                self._act(verdict, error, trouble)
        elif self.state is not LifecycleState.RESTARTING:
            self.broke(error)

    def why_cut_short(self, envelope: Envelope) -> ActorError:
        """What is raised at the asker of a message that was cut short on the actor's account."""
        if self.exit is not None:
            return self.exit.as_error(self.name)
        reason = "it was cut short" if self._round is None else self._round.exit_of(self).reason
        return ActorRestarted(self.name, envelope.handler.kind.__name__, reason)

    def _ask_supervisor(self, error: BaseException) -> Verdict | Awaitable[Verdict]:
        parent = self.parent
        if parent is None or parent.exit is not None or parent.actor is None:
            return None
        origin = here.get()
        here.set(Origin(parent, (self.address, parent.address)))
        try:
            verdict: Verdict | Awaitable[Verdict] = parent.actor.__judge__(self, error)
        except Exception:  # noqa: BLE001 - who cannot decide passes the failure on
            return self._undecided()
        finally:
            here.set(origin)
        return verdict

    def _undecided(self) -> Directive:
        assert self.parent is not None
        logger(actor=self.parent.name).exception("on_child_failed failed", child=self.name)
        return Directive.ESCALATE

    def _suspend(self, verdict: Awaitable[Verdict], error: BaseException, trouble: Trouble) -> None:
        """Wait for a supervisor that has to think, in a task of its own."""
        assert self.parent is not None
        self._queue = []
        if self.state is LifecycleState.RUNNING:
            self._move(LifecycleEvent.SUSPEND)
        self.mailbox.signal(_exit_of(error))
        self.wake()
        self.parent.own(self._think(verdict, error, trouble, self._queue), "on_child_failed")

    async def _think(
        self,
        verdict: Awaitable[Verdict],
        error: BaseException,
        trouble: Trouble,
        queue: list[tuple[BaseException, Trouble]],
    ) -> None:
        core, section = self.core, self.core.runtime.section()
        here.set(Origin(self.parent, (self.address,)))
        timer = core.deadlines.call_at(core.runtime.now() + core.stop_timeout, section.interrupt)
        try:
            decided: Verdict = await section.run(_await(verdict))
        except Interrupted:
            logger(actor=self.name).error("on_child_failed was cut short", seconds=core.stop_timeout)
            decided = Directive.ESCALATE
        except Exception:  # noqa: BLE001 - who cannot decide passes the failure on
            decided = self._undecided()
        finally:
            timer.cancel()
        if self._queue is not queue:
            return  # its incarnation has ended meanwhile, or ends
        self._queue = None
        self._act(decided, error, trouble)
        for later in queue:
            self.judge(*later)

    # ------------------------------------------------------------ acted on

    def _act(self, verdict: Verdict, error: BaseException, trouble: Trouble) -> None:
        if self.exit is not None or (self._round is not None and trouble is not Trouble.START):
            return  # it ends, or is restarted, for another reason
        if verdict is not None and not isinstance(verdict, Directive):
            logger(actor=self.name).error("on_child_failed returned no Directive", returned=repr(verdict))
            verdict = Directive.ESCALATE
        directive = choose(trouble, verdict, self.supervision)
        if directive is Directive.RESTART:
            delay = self._spend(error)
            if delay is not None:
                self._restart(delay, error)
                return
            error, directive = self._exhausted(error), self._policy.exhausted
        if directive is Directive.RESUME:
            self._resume()
        elif directive is Directive.STOP:
            self._stop_group(error)
        else:
            self._escalate(error)

    @property
    def _policy(self) -> Supervision:
        return self.supervision or _DEFAULT

    def _spend(self, error: BaseException) -> float | None:
        """Take one restart: the seconds to wait before it; None: they are used up."""
        if self._budget is None:
            self._budget = Budget()
        attempt = self._budget.spend(self.core.runtime.now(), self._policy)
        return None if attempt is None else self._delay(attempt, error)

    def _delay(self, attempt: int, error: BaseException) -> float:
        """By its own strategy; by the default one where that fails, so that its fault is not the actor's."""
        try:
            return delay_before(self._policy.backoff, attempt, error)
        except Exception:  # noqa: BLE001 - whatever a strategy of the user's raises
            logger(actor=self.name).exception("backoff failed", backoff=repr(self._policy.backoff))
            return delay_before(_DEFAULT.backoff, attempt, error)

    def _exhausted(self, error: BaseException) -> BaseException:
        policy = self._policy
        exhausted = RestartsExhausted(self.name, policy.max_restarts, policy.within, f"{type(error).__name__}: {error}")
        exhausted.__cause__ = error
        return exhausted

    def _resume(self) -> None:
        if self.state is LifecycleState.SUSPENDED:
            self._move(LifecycleEvent.RESUME)
            self.wake()

    def _stop_group(self, error: BaseException) -> None:
        exit_, by = _exit_of(error), self.core.runtime.now() + self.core.stop_timeout
        for member in self._affected():
            if member is not self:
                member.request_stop(f"its sibling {self.name} failed: {exit_.reason}", by)
        self.fail(exit_)

    def _escalate(self, error: BaseException) -> None:
        exit_, parent = _exit_of(error), self.parent
        self.fail(exit_)
        if self.core.events is not None:
            name = None if parent is None else parent.name
            self.core.events.emit(Escalated(actor=self.name, parent=name, reason=exit_.reason))
        if parent is None:
            logger(actor=self.name).error("escalated past the top: the system lives on", reason=exit_.reason)
        else:
            parent.judge(error, Trouble.CHILD)

    def _affected(self) -> list[Ward]:
        """Who shares its fate, in the order they were spawned."""
        if self.supervision is None:
            return [self]
        group = [cell for cell in self.siblings() if cell.supervision is self.supervision]
        return affected(self.supervision.strategy, group, self)

    # ------------------------------------------------------------ restarted

    def _restart(self, delay: float, error: BaseException) -> None:
        core = self.core
        round_ = self._round
        if round_ is None:
            members = [ward for ward in self._affected() if ward is self or ward.may_join()]
            round_ = Round(members, self, _exit_of(error), core.deadlines, core.runtime.now)
            for ward in members:
                ward.join(round_)
        round_.hold_until(core.runtime.now() + delay)

    def may_join(self) -> bool:
        """True when it can be restarted: it has started, and is not between incarnations."""
        return self._round is None and self.state in _SERVING

    def join(self, round_: Round) -> None:
        """Be restarted: no message begins any more, and what runs is cut short."""
        self._round, self._queue = round_, None
        self._move(LifecycleEvent.RESTART)
        self.mailbox.signal(round_.exit_of(self))
        self.cut_short_again()
        self.wake()

    async def supervised(self) -> bool:
        """Do what the supervisor wants, once a signal has come; False: the actor does not go on.

        Raises:
            Interrupted: Its time to stop was up while it started again.
        """
        await self._until(lambda: self.state is not LifecycleState.SUSPENDED)
        round_ = self._round
        if self.exit is None and round_ is not None:
            try:
                await self._until(lambda: round_.may_go_down(self))
                if self.exit is None:
                    await self._go_down(round_)
                    await self._come_up(round_)
            finally:
                self._round = None
                round_.leave(self)
        if self.exit is None:
            queue, self._queue = self._queue or (), None
            self.mailbox.requeue()
            for failure in queue:
                self.judge(*failure)
        return self.actor is not None

    async def _go_down(self, round_: Round) -> None:
        exit_ = round_.exit_of(self)
        await self.wind_down(exit_, has_begun=True)
        for envelope in list(self.owed or ()):
            self.reject(envelope, self.why_cut_short(envelope))
        self.actor = None
        round_.is_down(self)

    async def _come_up(self, round_: Round) -> None:
        """Begin incarnations until one starts."""
        while self.actor is None:
            await self._until(lambda: round_.may_come_up(self) and self._queue is None)
            if self.exit is not None:
                return
            self.generation += 1
            self._queue = []  # failures of tasks that it starts are judged when it has started
            error = await self.begin()
            if error is None:
                self._is_up(round_)
                return
            await self.wind_down(_exit_of(error), has_begun=False)
            self.actor = self._queue = None
            if self.exit is None:
                logger(actor=self.name).error("actor could not start again", exc_info=error)
                self.judge(error, Trouble.START)

    def _is_up(self, round_: Round) -> None:
        if self.exit is not None:
            return
        self._move(LifecycleEvent.STARTED)
        reason = round_.exit_of(self).reason
        logger(actor=self.name).warning("actor restarted", generation=self.generation, reason=reason)
        if self.core.events is not None:
            self.core.events.emit(Restarted(actor=self.name, generation=self.generation, reason=reason))

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that wakes the serving task, or for the end."""
        while self.exit is None and not condition():
            self._waiter = waiter = self.core.runtime.promise()
            await waiter

    def _move(self, event: LifecycleEvent) -> None:
        self.state = TRANSITIONS[self.state][event]

    # ------------------------------------------------------------ seams for the life

    @abc.abstractmethod
    def siblings(self: W) -> list[W]:
        """All that its parent has spawned and that are not over, itself included, eldest first."""

    @abc.abstractmethod
    def own(self, coroutine: Coroutine[Any, Any, Any], what: str) -> Section:
        """Run a task that is the actor's."""

    @abc.abstractmethod
    def request_stop(self, reason: str, by: float | None) -> None:
        """Let it stop."""

    @abc.abstractmethod
    def fail(self, exit_: Exit) -> None:
        """End it as failed."""

    @abc.abstractmethod
    def cut_short_again(self) -> None:
        """Cut short what runs, and again if it does not want to end."""

    @abc.abstractmethod
    async def begin(self) -> Exception | None:
        """Construct the actor and let it start; what it raised."""

    @abc.abstractmethod
    async def wind_down(self, exit_: Exit | None, *, has_begun: bool) -> None:
        """End an incarnation: its tasks, its children, ``on_stop`` if it had begun."""


async def _await(verdict: Awaitable[Verdict]) -> Verdict:
    return await verdict


def _exit_of(error: BaseException) -> Exit:
    return Exit("failed", f"{type(error).__name__}: {error}", error)
