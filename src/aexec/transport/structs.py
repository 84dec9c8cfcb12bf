"""The messages of each step, as msgspec makes them: several times as fast as pickle.

A message that is not exactly what its class declares (a payload of another kind, a numpy
number among the token ids) is left to pickle: the check is that msgspec refuses it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from aexec.messages.batch import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from aexec.messages.control import CallMethod, Dump, Greet, Ping, Pong, Revoke, Shutdown
from aexec.messages.step import ExecuteModel, ForwardLaunched, PairedStep, SampleTokens, StepId, StepResult
from aexec.transport.frames import INLINE
from aexec.transport.pickling import dumps, is_plain, loads

__all__ = ("STRUCTS", "STRUCT_DECODERS", "STRUCT_ENCODERS", "paired", "surely_read")

_Packed = tuple[bytes, list[memoryview]]
_CallId = Annotated[int, msgspec.Meta(ge=0)]


class _NotHot(TypeError):
    """This one goes by pickle."""


class _Codec(NamedTuple):
    """How one type travels."""

    encode: Callable[[Any], _Packed]
    decode: Callable[[Any, list[Any]], Any]


class _Execute(msgspec.Struct, array_like=True):
    """``pickled``: a payload of another kind; ``sampling``: see ``PairedStep``, 0: it is the launch alone."""

    step: StepId
    payload: SchedulerOutput | None
    num_tokens: int | None
    pickled: bytes | None = None
    sampling: _CallId = 0  # comes last, as one byte, until it is known: see paired()


class _Result(msgspec.Struct, array_like=True):
    """``plain``: an output of built-in types; ``pickled``: one of another kind."""

    step: StepId
    output: ModelRunnerOutput | None = None
    plain: Any = None
    pickled: bytes | None = None


class _Sample(msgspec.Struct, array_like=True):
    """``bitmask``: the rows if they are few; else they are a buffer."""

    step: StepId
    request_ids: list[str] | None = None
    dtype: str = ""
    shape: tuple[int, ...] = ()
    bitmask: bytearray | None = None


_encode = msgspec.msgpack.Encoder().encode
_INT64, _INT64_CODE = struct.Struct(">Bq"), 0xD3  # as msgpack has it


def _plain(kind: type[Any]) -> _Codec:
    decode = msgspec.msgpack.Decoder(kind).decode

    def encode(message: Any) -> _Packed:
        return _encode(message), []

    def made(body: Any, _: list[Any]) -> Any:
        return decode(body)

    return _Codec(encode, made)


def _pickled(value: Any) -> _Packed:
    pieces, buffers = dumps(value)
    if len(pieces) > 1:
        raise _NotHot  # it is large: no copy more than there has to be
    return pieces[0], buffers


def _execute() -> _Codec:
    decode = msgspec.msgpack.Decoder(_Execute).decode

    def encode(message: ExecuteModel) -> _Packed:
        if message.payload is None or type(message.payload) is SchedulerOutput:
            return _encode(_Execute(message.step, message.payload, message.num_tokens)), []
        stream, buffers = _pickled(message.payload)
        return _encode(_Execute(message.step, None, message.num_tokens, stream)), buffers

    def made(body: Any, buffers: list[Any]) -> ExecuteModel | PairedStep:
        wire = decode(body)
        payload = wire.payload if wire.pickled is None else loads(wire.pickled, buffers)
        launch = ExecuteModel(wire.step, payload, wire.num_tokens)
        return PairedStep(launch, wire.sampling) if wire.sampling else launch

    return _Codec(encode, made)


def surely_read(message: ExecuteModel) -> bool:
    """True for one that has nothing of a user's own in it, which the other end may be unable to make."""
    return message.payload is None or message.payload.__class__ is SchedulerOutput


def paired(body: bytes, sampling: int) -> bytes:
    """The body of a ``PairedStep``, made of that of its launch."""
    return body[:-1] + _INT64.pack(_INT64_CODE, sampling)


def _result() -> _Codec:
    decode = msgspec.msgpack.Decoder(_Result).decode

    def encode(message: StepResult) -> _Packed:
        output = message.output
        if output is None or (type(output) is ModelRunnerOutput and output.kv_connector_output is None):
            return _encode(_Result(message.step, output)), []  # a connector's events are of types of its own
        if is_plain(output):
            return _encode(_Result(message.step, None, output)), []
        stream, buffers = _pickled(output)
        return _encode(_Result(message.step, None, None, stream)), buffers

    def made(body: Any, buffers: list[Any]) -> StepResult:
        wire = decode(body)
        if wire.pickled is not None:
            return StepResult(wire.step, loads(wire.pickled, buffers))
        return StepResult(wire.step, wire.plain if wire.output is None else wire.output)

    return _Codec(encode, made)


def _sample() -> _Codec:
    decode = msgspec.msgpack.Decoder(_Sample).decode

    def made(body: Any, buffers: list[Any]) -> SampleTokens:
        wire = decode(body)
        if wire.request_ids is None:
            return SampleTokens(wire.step)
        rows = buffers[0] if wire.bitmask is None else wire.bitmask
        bitmask = np.frombuffer(rows, wire.dtype).reshape(wire.shape)
        return SampleTokens(wire.step, GrammarOutput(request_ids=wire.request_ids, bitmask=bitmask))

    return _Codec(_encode_sample, made)


def _encode_sample(message: SampleTokens) -> _Packed:
    if message.grammar is None:
        return _encode(_Sample(message.step)), []
    bitmask = message.grammar.bitmask
    if type(bitmask) is not np.ndarray or not bitmask.flags.c_contiguous or bitmask.dtype.hasobject:
        raise _NotHot
    wire = _Sample(message.step, message.grammar.request_ids, bitmask.dtype.str, bitmask.shape)
    if bitmask.nbytes > INLINE:
        return _encode(wire), [bitmask.reshape(-1).view(np.uint8).data]
    wire.bitmask = bytearray(bitmask.tobytes())
    return _encode(wire), []


STRUCTS: tuple[type[Any], ...] = (
    ExecuteModel,
    SampleTokens,
    StepResult,
    ForwardLaunched,
    Ping,
    Pong,
    Revoke,
    Dump,
    Greet,
    Shutdown,
    CallMethod,
)
"""What goes by msgspec where it can; both ends are of one version, so that the order is the code."""


def _call() -> _Codec:
    def encode(message: CallMethod) -> _Packed:
        kwargs = message.kwargs or None  # a dict is more to look through
        pieces, buffers = dumps((message.call, message.method, message.args, kwargs, message.after, message.reply_rank))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces), buffers

    def made(body: Any, buffers: list[Any]) -> CallMethod:
        call, method, args, kwargs, after, rank = loads(body, buffers)
        return CallMethod(call=call, method=method, args=args, kwargs=kwargs or {}, after=after, reply_rank=rank)

    return _Codec(encode, made)


_SPECIAL: dict[type[Any], Callable[[], _Codec]] = {
    ExecuteModel: _execute,
    SampleTokens: _sample,
    StepResult: _result,
    CallMethod: _call,
}
_CODECS = [_SPECIAL[kind]() if kind in _SPECIAL else _plain(kind) for kind in STRUCTS]
STRUCT_DECODERS = tuple(codec.decode for codec in _CODECS)
"""By the number of their type."""

STRUCT_ENCODERS: dict[Any, tuple[int, Callable[[Any], _Packed]]] = {
    kind: (number, codec.encode) for number, (kind, codec) in enumerate(zip(STRUCTS, _CODECS, strict=True))
}
"""By type: its number, and what makes body and buffers; raises for what has to go by pickle."""
