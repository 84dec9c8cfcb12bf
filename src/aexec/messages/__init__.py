"""What travels between actors."""

from __future__ import annotations

from aexec.messages.base import Message as Message
from aexec.messages.batch import CachedRequestData as CachedRequestData
from aexec.messages.batch import GrammarOutput as GrammarOutput
from aexec.messages.batch import KVTransfer as KVTransfer
from aexec.messages.batch import ModelRunnerOutput as ModelRunnerOutput
from aexec.messages.batch import NewRequestData as NewRequestData
from aexec.messages.batch import SchedulerOutput as SchedulerOutput
from aexec.messages.request import FinishReason as FinishReason
from aexec.messages.request import SamplingParams as SamplingParams
from aexec.messages.request import TokenChunk as TokenChunk
from aexec.messages.request import TokenLogprobs as TokenLogprobs
from aexec.messages.step import ExecuteModel as ExecuteModel
from aexec.messages.step import ForwardLaunched as ForwardLaunched
from aexec.messages.step import SampleTokens as SampleTokens
from aexec.messages.step import StepId as StepId
from aexec.messages.step import StepResult as StepResult
from aexec.messages.structured import StructuredOutput as StructuredOutput

__all__ = (
    "CachedRequestData",
    "ExecuteModel",
    "FinishReason",
    "ForwardLaunched",
    "GrammarOutput",
    "KVTransfer",
    "Message",
    "ModelRunnerOutput",
    "NewRequestData",
    "SampleTokens",
    "SamplingParams",
    "SchedulerOutput",
    "StepId",
    "StepResult",
    "StructuredOutput",
    "TokenChunk",
    "TokenLogprobs",
)
