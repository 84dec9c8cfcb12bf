"""Errors of a worker's own code, on their way to the caller.

What the caller sees is a :class:`~aexec.errors.RemoteError` and, wherever the original
type can be had, an instance of that type too, so that ``except ValueError`` works. The
class is made up for each original type and never runs its constructor: constructors ask
for arguments that only the raising code knew. Errors of aexec itself pass unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import traceback
import types
from collections.abc import Hashable
from typing import Any, NamedTuple, cast

import msgspec

from aexec.errors import AexecError, RemoteError, note
from aexec.worker.names import load

__all__ = ("RemoteFailure", "caller_error", "capture", "departing", "rebuild", "remote_error", "traceback_text")

# Python gives these a meaning of their own: raising one that came from afar would end a
# generator, or look like a cancellation.
_NOT_IMPERSONATED = (StopIteration, StopAsyncIteration, GeneratorExit)


class RemoteFailure(msgspec.Struct, frozen=True, kw_only=True):
    """An exception as plain data, for workers in other processes; see :func:`rebuild`.

    Attributes:
        rank: The rank that raised it.
        method: The worker's method.
        type_path: Its type, as ``package.module:Class``.
        text: ``str()`` of it.
        traceback_text: The traceback, formatted where it was raised.
        state: Pickled arguments and attributes; what does not pickle is left out.
    """

    rank: int
    method: str
    type_path: str
    text: str
    traceback_text: str
    state: bytes = b""


def caller_error(error: BaseException, *, rank: int, method: str) -> AexecError:
    """What the caller is given for ``error``, raised by ``method`` on ``rank``."""
    if isinstance(error, RemoteError):
        return error  # it says where it comes from
    if isinstance(error, AexecError):
        note(error, f"raised by {method} on rank {rank}")
        return error
    return remote_error(error, rank=rank, method=method)


def remote_error(error: BaseException, *, rank: int, method: str) -> RemoteError:
    """Wrap a live exception of this process."""
    return _make(type(error), _state_of(error), _facts(error, rank=rank, method=method))


def capture(error: BaseException, *, rank: int, method: str) -> RemoteFailure:
    """Turn a live exception into data that always travels."""
    return RemoteFailure(**_facts(error, rank=rank, method=method), state=_pickled(_state_of(error)))


def departing(error: BaseException, *, rank: int, method: str) -> AexecError | RemoteFailure:
    """What another process is sent of ``error``: errors of aexec itself as they are, others captured."""
    if isinstance(error, AexecError) and type(error).__module__.startswith("aexec.") and _pickles(error):
        return caller_error(error, rank=rank, method=method)
    return capture(error, rank=rank, method=method)


def rebuild(failure: RemoteFailure) -> RemoteError:
    """The error that ``failure`` describes, with its original type if that is known here."""
    facts = {name: getattr(failure, name) for name in _FACTS}
    return _make(_importable(failure.type_path), _unpickled(failure), facts)


def traceback_text(error: BaseException) -> str:
    """The traceback without aexec's own frames at its head; none at all if it was the call that failed."""
    frames = error.__traceback__
    if frames is not None and frames.tb_next is None and isinstance(error, TypeError) and _is_in(frames, _CALLERS):
        return "".join(traceback.format_exception_only(error))  # the arguments did not fit: nothing of it had run
    while frames is not None and _is_plumbing(frames.tb_frame.f_globals.get("__name__", "")):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


def _is_in(frames: types.TracebackType, modules: frozenset[str]) -> bool:
    return frames.tb_frame.f_globals.get("__name__", "") in modules


def _is_plumbing(module: str) -> bool:
    return module in _PLUMBING or module.startswith("aexec.actor.")


_PLUMBING = frozenset(
    f"aexec.{name}"
    for name in (
        "model.actor",
        "worker.compute",
        "worker.coroutines",
        "worker.device",
        "worker.host",
        "worker.process",
        "worker.worker",
    )
)


_CALLERS = frozenset(("aexec.worker.compute", "aexec.worker.device"))


class _State(NamedTuple):
    """What an exception carried: arguments for its ``__new__``, its ``args``, its attributes."""

    new: tuple[Any, ...]
    args: tuple[Any, ...]
    attributes: dict[str, Any]


class _Remote(RemoteError):
    """What is raised: knows how to pickle, whatever its original carried."""

    _state: _State

    def __reduce__(self) -> tuple[Any, ...]:
        facts = {name: getattr(self, name) for name in _FACTS}
        return rebuild, (RemoteFailure(**facts, state=_pickled(self._state)),)


_Remote.__name__ = _Remote.__qualname__ = RemoteError.__name__
_Remote.__module__ = RemoteError.__module__

_FACTS = ("rank", "method", "type_path", "text", "traceback_text")


def _facts(error: BaseException, *, rank: int, method: str) -> dict[str, Any]:
    path = f"{type(error).__module__}:{type(error).__qualname__}"
    values = (rank, method, path, _text(error), traceback_text(error))
    return dict(zip(_FACTS, values, strict=True))


def _state_of(error: BaseException) -> _State:
    new: tuple[Any, ...] = error.args
    attributes: dict[str, Any] = dict(vars(error))
    if isinstance(type(error).__reduce__, types.MethodDescriptorType):  # built in: it knows of what is in C fields
        reduced: Any = error.__reduce__()
        new = reduced[1]
        attributes.update(reduced[2] if len(reduced) > 2 and reduced[2] else {})
    attributes.pop("__notes__", None)
    return _State(new, error.args, attributes)


def _make(kind: type[BaseException] | None, state: _State, facts: dict[str, Any]) -> _Remote:
    error = _instance(_impersonation(cast("Hashable", kind)) if kind else _Remote, kind, state.new)
    for name, value in state.attributes.items():
        with contextlib.suppress(AttributeError, TypeError):  # read-only properties
            setattr(error, name, value)
    error.args = tuple(state.args)
    error.__dict__.update(facts, _state=state)
    error.type_name = facts["type_path"].replace(":", ".").removeprefix("builtins.")
    error.add_note(f"rank {error.rank} raised it here:\n{error.traceback_text.rstrip()}")
    return error


def _instance(made_up: type[_Remote], kind: type[BaseException] | None, args: tuple[Any, ...]) -> _Remote:
    for new in (made_up.__new__, Exception.__new__):
        with contextlib.suppress(Exception):  # a constructor with ideas of its own
            error = new(made_up, *args)
            if kind is not None and isinstance(kind.__init__, types.WrapperDescriptorType):
                kind.__init__(error, *args)  # built in, so without surprises: sets errno, reason...
            return error
    return _Remote()


@functools.lru_cache(maxsize=256)
def _impersonation(kind: Any) -> type[_Remote]:
    if not issubclass(kind, Exception) or issubclass(kind, _NOT_IMPERSONATED):
        return _Remote
    names = {"__module__": RemoteError.__module__, "__doc__": f"Remote {kind.__qualname__}."}
    try:
        return type(f"RemoteError[{kind.__qualname__}]", (_Remote, kind), names)
    except TypeError:  # two layouts that do not mix, or a final class
        return _Remote


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - a broken __str__ must not hide the error
        return f"<its __str__ raised {type(broken).__name__}>"


def _pickled(state: _State) -> bytes:
    kept = {name: value for name, value in state.attributes.items() if _pickles(value)}
    return pickle.dumps((*(tuple(v if _pickles(v) else repr(v) for v in values) for values in state[:2]), kept))


def _pickles(value: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(value))  # noqa: S301 - our own bytes
    except Exception:  # noqa: BLE001 - whatever it is, it cannot travel
        return False
    return True


def _unpickled(failure: RemoteFailure) -> _State:
    try:
        return _State(*pickle.loads(failure.state))  # noqa: S301 - from a worker of ours
    except Exception:  # noqa: BLE001 - holds a class that this process does not know
        return _State((), (failure.text,), {})


def _importable(type_path: str) -> type[BaseException] | None:
    try:
        found = load(type_path, "the type of a remote error")
    except Exception:  # noqa: BLE001 - any reason will do: the error is shown without its type
        return None
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
