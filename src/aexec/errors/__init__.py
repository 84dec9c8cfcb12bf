"""Every error of aexec on one screen, grouped by who must act.

You (the caller) mend a :class:`ConfigError`, a :class:`RequestError` or a
:class:`StepStateError`; the operator looks at :class:`WorkerDied`, at
:class:`ModelLoadError`, :class:`OutOfMemory` and :class:`PlacementFailed`; your own code answers for a
:class:`RemoteError`; a caller may simply try again after :class:`ExecutorUnavailable`
(:class:`EngineRecovering` and :class:`EngineDraining` are such).
Errors keep all they know as attributes, print one readable sentence and pickle.
"""

from __future__ import annotations

from aexec.errors.actors import ActorDied as ActorDied
from aexec.errors.actors import ActorError as ActorError
from aexec.errors.actors import ActorRestarted as ActorRestarted
from aexec.errors.actors import ActorStopped as ActorStopped
from aexec.errors.actors import CallCycle as CallCycle
from aexec.errors.actors import CallTimeout as CallTimeout
from aexec.errors.actors import MailboxFull as MailboxFull
from aexec.errors.actors import MessageNotPortable as MessageNotPortable
from aexec.errors.actors import RestartsExhausted as RestartsExhausted
from aexec.errors.actors import UnhandledMessage as UnhandledMessage
from aexec.errors.actors import WrongLoop as WrongLoop
from aexec.errors.engine import EngineDraining as EngineDraining
from aexec.errors.engine import EngineRecovering as EngineRecovering
from aexec.errors.engine import RanksDisagree as RanksDisagree
from aexec.errors.model import ModelNotReady as ModelNotReady
from aexec.errors.model import WeightsMismatch as WeightsMismatch
from aexec.errors.nodes import LeaderLost as LeaderLost
from aexec.errors.nodes import LeaderNotFound as LeaderNotFound
from aexec.errors.nodes import NodeRefused as NodeRefused
from aexec.errors.request import InvalidRequest as InvalidRequest
from aexec.errors.request import QueueFull as QueueFull
from aexec.errors.request import RequestAborted as RequestAborted
from aexec.errors.request import RequestError as RequestError
from aexec.errors.request import RequestFailed as RequestFailed
from aexec.errors.request import RequestTimeout as RequestTimeout
from aexec.errors.root import AexecError as AexecError
from aexec.errors.root import note as note
from aexec.errors.setup import ConfigError as ConfigError
from aexec.errors.setup import MissingExtra as MissingExtra
from aexec.errors.setup import ModelLoadError as ModelLoadError
from aexec.errors.setup import ModelNotFound as ModelNotFound
from aexec.errors.setup import OutOfMemory as OutOfMemory
from aexec.errors.setup import PlacementFailed as PlacementFailed
from aexec.errors.setup import UnsupportedModel as UnsupportedModel
from aexec.errors.transport import ArenaFull as ArenaFull
from aexec.errors.transport import ChannelClosed as ChannelClosed
from aexec.errors.transport import ChannelFull as ChannelFull
from aexec.errors.transport import LinkRefused as LinkRefused
from aexec.errors.transport import MeetingFailed as MeetingFailed
from aexec.errors.transport import MessageNotDecoded as MessageNotDecoded
from aexec.errors.transport import MessageTooLarge as MessageTooLarge
from aexec.errors.transport import TransportError as TransportError
from aexec.errors.workers import ExecutorClosed as ExecutorClosed
from aexec.errors.workers import ExecutorPaused as ExecutorPaused
from aexec.errors.workers import ExecutorUnavailable as ExecutorUnavailable
from aexec.errors.workers import PeerLost as PeerLost
from aexec.errors.workers import ProtocolError as ProtocolError
from aexec.errors.workers import RanksDiverged as RanksDiverged
from aexec.errors.workers import RanksMissing as RanksMissing
from aexec.errors.workers import RemoteError as RemoteError
from aexec.errors.workers import StepStateError as StepStateError
from aexec.errors.workers import UnknownMethod as UnknownMethod
from aexec.errors.workers import WorkerDied as WorkerDied

__all__ = (
    "ActorDied",
    "ActorError",
    "ActorRestarted",
    "ActorStopped",
    "AexecError",
    "ArenaFull",
    "CallCycle",
    "CallTimeout",
    "ChannelClosed",
    "ChannelFull",
    "ConfigError",
    "EngineDraining",
    "EngineRecovering",
    "ExecutorClosed",
    "ExecutorPaused",
    "ExecutorUnavailable",
    "InvalidRequest",
    "LeaderLost",
    "LeaderNotFound",
    "LinkRefused",
    "MailboxFull",
    "MeetingFailed",
    "MessageNotDecoded",
    "MessageNotPortable",
    "MessageTooLarge",
    "MissingExtra",
    "ModelLoadError",
    "ModelNotFound",
    "ModelNotReady",
    "NodeRefused",
    "OutOfMemory",
    "PeerLost",
    "PlacementFailed",
    "ProtocolError",
    "QueueFull",
    "RanksDisagree",
    "RanksDiverged",
    "RanksMissing",
    "RemoteError",
    "RequestAborted",
    "RequestError",
    "RequestFailed",
    "RequestTimeout",
    "RestartsExhausted",
    "StepStateError",
    "TransportError",
    "UnhandledMessage",
    "UnknownMethod",
    "UnsupportedModel",
    "WeightsMismatch",
    "WorkerDied",
    "WrongLoop",
    "note",
)
