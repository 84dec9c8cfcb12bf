from __future__ import annotations

import functools

import pytest

from aexec.actor import Actor, Deferred, handles
from aexec.messages.base import Message


class Ping(Message[str], frozen=True):
    pass


class Loud(Ping, frozen=True):
    pass


class Pong(Message[int], frozen=True):
    pass


class Base(Actor):
    @handles(Ping)
    def ping(self, message: Ping) -> str:
        return "base"


def names(actor: type[Actor]) -> tuple[str, ...]:
    return actor.__handlers__.names


def test_the_table_holds_each_handler():
    """A class knows its messages; a class without handlers knows none."""
    assert names(Base) == ("Ping",)
    assert names(Actor) == ()
    assert repr(Base.__handlers__) == "<HandlerTable: Ping>"


def test_handlers_are_inherited():
    """A subclass adds its own to those of its bases."""

    class Derived(Base):
        @handles(Pong)
        def pong(self, message: Pong) -> int:
            return 1

    assert names(Derived) == ("Ping", "Pong")
    assert names(Base) == ("Ping",)


def test_an_override_stays_the_handler():
    """An overriding method handles what it overrides, with its own kind of def and the options of before."""

    class Urgent(Actor):
        @handles(Ping, lane="urgent")
        def ping(self, message: Ping) -> str:
            return "urgent"

    class Derived(Urgent):
        async def ping(self, message: Ping) -> str:
            return "derived"

    handler = Derived.__handlers__.find(Ping)
    assert handler is not None
    assert (handler.function, handler.is_async, handler.lane) == (Derived.ping, True, "urgent")


def test_the_most_derived_handler_wins():
    """A handler of another name for the same message takes its place in the subclass."""

    class Derived(Base):
        @handles(Ping)
        def other(self, message: Ping) -> str:
            return "other"

    handler = Derived.__handlers__.find(Ping)
    assert handler is not None
    assert handler.name == "other"


def test_a_subclass_of_a_message_goes_to_its_handler():
    """A message is handled as what it is, or as the nearest of its bases."""
    handler = Base.__handlers__.find(Loud)
    assert handler is not None
    assert handler.kind is Ping
    assert Base.__handlers__.find(Pong) is None
    assert names(Base) == ("Ping",)


def test_an_annotation_has_to_agree():
    """A handler annotated with another message is refused when its class is created, by both names."""
    with pytest.raises(TypeError, match=r"Wrong\.ping handles Ping, and its parameter 'message' is annotated Pong"):

        class Wrong(Actor):
            @handles(Ping)
            def ping(self, message: Pong) -> str:
                return ""


def test_local_messages_are_recognised_by_name():
    """A message class that is local to a function cannot be looked up, and is compared by its name."""

    class Local(Message[None], frozen=True):
        pass

    class Right(Actor):
        @handles(Local)
        def local(self, message: Local) -> None: ...

    assert names(Right) == ("Local",)
    with pytest.raises(TypeError, match="make the two agree"):

        class Wrong(Actor):
            @handles(Ping)
            def ping(self, message: Local) -> str:
                return ""


def test_a_base_of_the_message_is_a_fair_annotation():
    """A parameter may be annotated with a base class of its message, or not at all."""

    class Right(Actor):
        @handles(Loud)
        def loud(self, message: Ping) -> str:
            return ""

        @handles(Pong)
        def pong(self, message):
            return 1

    assert names(Right) == ("Loud", "Pong")


def test_two_handlers_for_one_message_are_refused():
    """Within one class a message has one handler; the error names both."""
    with pytest.raises(TypeError, match="Twice has two handlers for Ping: first and second"):

        class Twice(Actor):
            @handles(Ping)
            def first(self, message: Ping) -> str:
                return ""

            @handles(Ping)
            def second(self, message: Ping) -> str:
                return ""


def test_a_method_handles_one_message():
    """A second decorator, or an override for another message, is refused."""
    with pytest.raises(TypeError, match="a method handles one"):

        class Both(Actor):
            @handles(Pong)
            @handles(Ping)
            def both(self, message: Ping) -> str:
                return ""

    with pytest.raises(TypeError, match="handles another message than the method that it overrides"):

        class Other(Base):
            @handles(Pong)
            def ping(self, message: Pong) -> int:
                return 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lane": "system"}, "lane is 'system'"),
        ({"concurrent": 0}, "concurrent 0"),
        ({"concurrent": 2}, "a plain method, which never awaits"),
    ],
)
def test_senseless_options_are_refused(options, match):
    """Options that cannot be meant are refused where they are written."""
    with pytest.raises(TypeError, match=match):

        @handles(Ping, **options)
        def ping(self, message: Ping) -> str:
            return ""


def test_only_messages_are_handled():
    """handles() takes a message type and nothing else."""
    with pytest.raises(TypeError, match="a subclass of Message; this is <class 'int'>"):
        handles(int)


def test_a_handler_takes_its_message_and_nothing_else():
    """A method of another signature is refused when its class is created."""
    with pytest.raises(TypeError, match="has to take one argument, a Ping"):

        class Wrong(Actor):
            @handles(Ping)
            def ping(self) -> str:
                return ""


def test_an_async_generator_is_no_handler():
    """A handler returns one reply."""
    with pytest.raises(TypeError, match="is an async generator"):

        @handles(Ping)
        async def ping(self, message: Ping):
            yield ""


def test_a_wrapped_async_def_is_awaited():
    """A decorator between does not hide that the method is an async def."""

    def logged(function):
        @functools.wraps(function)
        def wrapper(*args):
            return function(*args)

        return wrapper

    class Wrapped(Actor):
        @handles(Ping)
        @logged
        async def ping(self, message: Ping) -> str:
            return "wrapped"

    handler = Wrapped.__handlers__.find(Ping)
    assert handler is not None
    assert handler.is_async


def test_a_handler_may_be_called_without_a_system():
    """An actor is a plain class, and its handlers are its methods."""
    assert Base().ping(Ping()) == "base"


def test_the_table_knows_whether_there_is_something_to_start_or_stop():
    """Classes without on_start and on_stop cost no await for them."""

    class Both(Actor):
        async def on_start(self) -> None: ...

        async def on_stop(self, reason: object) -> None: ...

    assert (Base.__handlers__.starts, Base.__handlers__.stops) == (False, False)
    assert (Both.__handlers__.starts, Both.__handlers__.stops) == (True, True)


def test_a_deferred_reply_is_a_reply():
    """A handler may return the reply, or a Deferred of it."""

    class Later(Actor):
        @handles(Ping)
        def ping(self, message: Ping) -> Deferred[str]:
            return self.context.defer(message)

    with pytest.raises(RuntimeError, match="Later has no context"):
        Later().ping(Ping())
