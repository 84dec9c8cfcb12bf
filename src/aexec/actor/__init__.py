"""Async actors with typed mailboxes.

An actor is a class with private state, one bounded mailbox, and a handler per message
type. Messages are frozen values that declare their reply, so that ``await ref.ask(m)`` is
typed. Actors live in an :class:`ActorSystem`, on asyncio, uvloop or trio.
"""

from __future__ import annotations

from aexec.actor.actor import Actor as Actor
from aexec.actor.context import Context as Context
from aexec.actor.context import OwnedTask as OwnedTask
from aexec.actor.deadlines import Timer as Timer
from aexec.actor.deferred import Deferred as Deferred
from aexec.actor.envelope import trace_context as trace_context
from aexec.actor.events import ActorEvent as ActorEvent
from aexec.actor.events import DeadLettered as DeadLettered
from aexec.actor.events import Escalated as Escalated
from aexec.actor.events import Exited as Exited
from aexec.actor.events import Restarted as Restarted
from aexec.actor.events import Spawned as Spawned
from aexec.actor.group import AsDone as AsDone
from aexec.actor.group import RefGroup as RefGroup
from aexec.actor.handlers import handles as handles
from aexec.actor.inbox import Default as Default
from aexec.actor.lifecycle import Exit as Exit
from aexec.actor.lifecycle import LifecycleState as LifecycleState
from aexec.actor.ref import Ref as Ref
from aexec.actor.spawner import Spawner as Spawner
from aexec.actor.statistics import ActorStatistics as ActorStatistics
from aexec.actor.statistics import DeadLetterCounts as DeadLetterCounts
from aexec.actor.statistics import MailboxStatistics as MailboxStatistics
from aexec.actor.statistics import SystemStatistics as SystemStatistics
from aexec.actor.stream import Stream as Stream
from aexec.actor.supervision import Backoff as Backoff
from aexec.actor.supervision import Directive as Directive
from aexec.actor.supervision import Strategy as Strategy
from aexec.actor.supervision import Supervision as Supervision
from aexec.actor.system import ActorSystem as ActorSystem
from aexec.actor.ticker import Ticker as Ticker
from aexec.actor.tracing import Span as Span
from aexec.actor.tracing import Tracer as Tracer
from aexec.actor.tree import Tree as Tree
from aexec.actor.watch import Terminated as Terminated
from aexec.messages.base import Message as Message
from aexec.messages.base import StreamMessage as StreamMessage

__all__ = (
    "Actor",
    "ActorEvent",
    "ActorStatistics",
    "ActorSystem",
    "AsDone",
    "Backoff",
    "Context",
    "DeadLetterCounts",
    "DeadLettered",
    "Default",
    "Deferred",
    "Directive",
    "Escalated",
    "Exit",
    "Exited",
    "LifecycleState",
    "MailboxStatistics",
    "Message",
    "OwnedTask",
    "Ref",
    "RefGroup",
    "Restarted",
    "Span",
    "Spawned",
    "Spawner",
    "Strategy",
    "Stream",
    "StreamMessage",
    "Supervision",
    "SystemStatistics",
    "Terminated",
    "Ticker",
    "Timer",
    "Tracer",
    "Tree",
    "handles",
    "trace_context",
)
