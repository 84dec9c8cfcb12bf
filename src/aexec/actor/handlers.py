"""Which method handles which message, checked by type checkers and once at run time.

A type checker sees that a handler returns the reply that its message declares; the
annotation of its parameter is compared with the message when the class is created.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from dataclasses import replace
from typing import Any, Protocol, TypeVar, overload

from aexec.actor.channel import pump
from aexec.actor.deferred import Deferred
from aexec.actor.table import Handler, HandlerTable, Lane
from aexec.messages.base import AnyMessage, Message, StreamMessage

__all__ = ("build_table", "handles")

A_contra = TypeVar("A_contra", contravariant=True)
M = TypeVar("M", bound=AnyMessage)
M_co = TypeVar("M_co", covariant=True)
Base_co = TypeVar("Base_co", covariant=True)
R = TypeVar("R")

_MARK = "__handles__"
STREAMS = 16  # of one handler, at a time


class _Decorator(Protocol[M_co, Base_co]):
    """Takes a method for messages of type ``M_co``, and gives back what it took.

    Both parameters are that type: the second is looked at as a ``Message[R]``, for its ``R``.
    """

    @overload
    def __call__(
        self: _Decorator[M, StreamMessage[R]], function: Callable[[A_contra, M], AsyncIterator[R]], /
    ) -> Callable[[A_contra, M], AsyncIterator[R]]: ...

    @overload
    def __call__(
        self: _Decorator[M, Message[R]], function: Callable[[A_contra, M], Coroutine[Any, Any, R]], /
    ) -> Callable[[A_contra, M], Coroutine[Any, Any, R]]: ...

    @overload
    def __call__(
        self: _Decorator[M, Message[R]], function: Callable[[A_contra, M], Coroutine[Any, Any, R | Deferred[R]]], /
    ) -> Callable[[A_contra, M], Coroutine[Any, Any, R | Deferred[R]]]: ...

    @overload
    def __call__(
        self: _Decorator[M, Message[R]], function: Callable[[A_contra, M], Deferred[R]], /
    ) -> Callable[[A_contra, M], Deferred[R]]: ...

    @overload
    def __call__(
        self: _Decorator[M, Message[R]], function: Callable[[A_contra, M], R], /
    ) -> Callable[[A_contra, M], R]: ...

    @overload
    def __call__(
        self: _Decorator[M, Message[R]], function: Callable[[A_contra, M], R | Deferred[R]], /
    ) -> Callable[[A_contra, M], R | Deferred[R]]: ...


def handles(
    kind: type[M],
    *,
    lane: Lane = "normal",
    concurrent: int | None = None,
    shield: bool = False,
    fatal: type[BaseException] | tuple[type[BaseException], ...] = (),
    when: str | Collection[str] | None = None,
) -> _Decorator[M, M]:
    """Make a method the handler of messages of type ``kind``.

    A plain method runs inline, which is cheapest; an ``async def`` is awaited, and the
    mailbox waits with it. What it raises goes to the asker, and the actor lives on. The
    handler of a ``StreamMessage`` is an async generator, and runs beside the mailbox.

    Args:
        kind: The type of the message.
        lane: ``urgent`` messages are taken before normal ones, and also while a normal
            handler awaits.
        concurrent: More than 1: so many messages of this type may be in hand at a time,
            beside all others. Only for ``async def``; a plain method never awaits. None:
            1, and 16 for streams.
        shield: The asker's cancellation and deadline do not cancel the handler, as with
            a collective that all ranks have to finish.
        fatal: Errors after which the actor cannot be trusted, as of a device that is lost:
            they end it, be it an ask or a tell. An actor has a ``fatal`` for all its handlers.
        when: The state, or states, of the actor in which these messages are begun. Those
            that come in another one are postponed, in order, until ``self.state`` is set
            to one of them; they keep their deadlines, and take up room in the mailbox.

    Raises:
        TypeError: ``kind`` is not a message type, or the method is not fit for it.
    """
    _check_kind(kind)
    streams = issubclass(kind, StreamMessage)
    slots = concurrent if concurrent is not None else STREAMS if streams else 1
    if lane not in {"normal", "urgent"} or slots < 1:
        raise TypeError(f"lane is {lane!r} and concurrent {slots}: expected 'normal' or 'urgent', and at least 1")
    states = None if when is None else frozenset([when] if isinstance(when, str) else when)

    def mark(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        where = f"{function.__qualname__}, which handles {kind.__name__},"
        if hasattr(function, _MARK):
            raise TypeError(f"{where} handles another message already: a method handles one")
        _check_shape(where, function, streams=streams, shield=shield)
        is_async = streams or _is_async(function)
        if slots > 1 and not is_async:
            raise TypeError(f"{where} is a plain method, which never awaits: concurrent={slots} is for async def")
        run = pump(function) if streams else function
        fatals = fatal if isinstance(fatal, tuple) else (fatal,)
        handler = Handler(kind, function.__name__, run, is_async, lane, slots, shield, fatals, states, streams)
        setattr(function, _MARK, handler)
        return function

    return mark


def build_table(actor: type, root: type) -> HandlerTable:
    """The handlers of a class, inherited ones included; called once for each class.

    Args:
        actor: The class.
        root: The base of all actors, whose ``on_start`` and ``on_stop`` do nothing.

    Raises:
        TypeError: A handler's parameter is annotated with another type than its message,
            or two methods of the class handle the same one.
    """
    handlers: dict[type, Handler] = {}
    for base in reversed(actor.__mro__):
        own = [mark for member in vars(base).values() if isinstance(mark := getattr(member, _MARK, None), Handler)]
        _check_unique(base, own)
        for inherited in list(handlers.values()):
            if inherited.name in vars(base) and inherited.kind not in {handler.kind for handler in own}:
                handlers[inherited.kind] = _override(inherited, vars(base)[inherited.name])
        handlers.update((handler.kind, handler) for handler in own)
    for handler in handlers.values():
        _check_annotation(actor, handler)
    starts, stops = (getattr(actor, name) is not getattr(root, name) for name in ("on_start", "on_stop"))
    return HandlerTable(handlers, starts=starts, stops=stops)


def _check_kind(kind: object) -> None:
    if not (isinstance(kind, type) and issubclass(kind, Message | StreamMessage)):
        raise TypeError(f"handles() takes a message type, a subclass of Message; this is {kind!r}")


def _check_shape(where: str, function: Callable[..., Any], *, streams: bool, shield: bool) -> None:
    is_generator = inspect.isasyncgenfunction(inspect.unwrap(function))
    if is_generator and not streams:
        raise TypeError(f"{where} is an async generator: a handler returns one reply, unless to a StreamMessage")
    if streams and not is_generator:
        raise TypeError(f"{where} is no async generator: the handler of a StreamMessage yields its items")
    if streams and shield:
        raise TypeError(f"{where} is a stream, which ends with its consumer: shield=True is for other handlers")


def _override(inherited: Handler, function: Callable[[Any, Any], Any]) -> Handler:
    """A subclass has overridden the method without saying ``@handles`` again."""
    if hasattr(function, _MARK):
        raise TypeError(
            f"{function.__qualname__} handles another message than the method that it overrides, "
            f"which handles {inherited.kind.__name__}: name it differently"
        )
    if inherited.is_stream:
        _check_shape(function.__qualname__, function, streams=True, shield=False)
        return replace(inherited, function=pump(function))
    return replace(inherited, function=function, is_async=_is_async(function))


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(inspect.unwrap(function))


def _check_unique(base: type, own: list[Handler]) -> None:
    names: dict[type, str] = {}
    for handler in own:
        other = names.setdefault(handler.kind, handler.name)
        if other != handler.name:
            raise TypeError(f"{base.__name__} has two handlers for {handler.kind.__name__}: {other} and {handler.name}")


def _check_annotation(actor: type, handler: Handler) -> None:
    function = inspect.unwrap(handler.function)
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) != 2:
        raise TypeError(f"{actor.__name__}.{handler.name} has to take one argument, a {handler.kind.__name__}")
    annotation = parameters[1].annotation
    if annotation is inspect.Parameter.empty or _names(annotation, handler.kind, function):
        return
    raise TypeError(
        f"{actor.__name__}.{handler.name} handles {handler.kind.__name__}, and its parameter "
        f"{parameters[1].name!r} is annotated {getattr(annotation, '__name__', annotation)}: make the two agree"
    )


def _names(annotation: Any, kind: type, function: Callable[..., Any]) -> bool:
    """True when an annotation means ``kind``; a text is read where the function was written."""
    if isinstance(annotation, str):
        text = annotation
        try:
            annotation = eval(text, getattr(function, "__globals__", {}))  # noqa: S307 - the author's own annotation
        except NameError:  # a class that is local to a function, as in a test
            return text.partition("[")[0].rpartition(".")[2] == kind.__name__
    origin = getattr(annotation, "__origin__", annotation)
    return origin is kind or (isinstance(origin, type) and issubclass(kind, origin))
