from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import threading

import pytest

from aexec.errors import AexecError, ConfigError, RemoteError, UnknownMethod
from aexec.worker.remote import (
    RemoteFailure,
    caller_error,
    capture,
    departing,
    rebuild,
    remote_error,
    traceback_text,
)


class Odd(Exception):
    """Asks for an argument that it does not pass on, and holds what does not pickle."""

    def __init__(self, text, *, code):
        super().__init__(text)
        self.code = code
        self.lock = threading.Lock()


class Choosy(Exception):
    def __new__(cls, one, two):
        made = super().__new__(cls)
        made.both = (one, two)
        return made


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return caught


ORIGINALS = [
    ValueError("bad", 3),
    KeyError("k"),
    FileNotFoundError(2, "no such file", "f.txt"),
    UnicodeDecodeError("utf8", b"x", 0, 1, "reason"),
    json.JSONDecodeError("message", "document", 1),
    subprocess.CalledProcessError(3, "command"),
    ImportError("gone", name="there"),
    ExceptionGroup("two", [ValueError(1), TypeError(2)]),
    TimeoutError("late"),
    MemoryError(),
    Odd("text", code=4),
    Choosy(1, 2),
]
by_type = pytest.mark.parametrize("original", ORIGINALS, ids=lambda error: type(error).__name__)


@by_type
def test_a_remote_error_is_of_the_original_type_too(original):
    """``except ValueError`` works, with the original's arguments."""
    error = remote_error(raised(original), rank=3, method="work")
    assert isinstance(error, RemoteError)
    assert isinstance(error, type(original))
    assert error.args == original.args
    assert (error.rank, error.method) == (3, "work")


@by_type
def test_a_remote_error_pickles(original):
    """It can be sent on, and says the same at its destination."""
    error = remote_error(raised(original), rank=3, method="work")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert isinstance(again, type(original))
    assert again.traceback_text == error.traceback_text


@by_type
def test_a_failure_from_another_process_is_rebuilt(original):
    """What was captured as data is raised as if it had happened here."""
    captured = pickle.loads(pickle.dumps(capture(raised(original), rank=1, method="work")))
    error = rebuild(captured)
    assert isinstance(error, type(original))
    assert str(error) == str(remote_error(raised(original), rank=1, method="work"))


def test_attributes_come_along_as_far_as_they_pickle():
    """The code is there, the lock is not."""
    error = rebuild(capture(raised(Odd("text", code=4)), rank=0, method="work"))
    assert error.code == 4
    assert not hasattr(error, "lock")


def test_attributes_of_built_in_errors_come_along():
    """A remote OSError has its errno and file name."""
    error = rebuild(capture(raised(FileNotFoundError(2, "no", "f.txt")), rank=0, method="work"))
    assert (error.errno, error.filename) == (2, "f.txt")


def test_it_says_where_and_what():
    """One readable line, and the remote traceback as a note."""
    error = remote_error(raised(KeyError("k")), rank=2, method="look_up")
    assert str(error) == "rank 2, look_up: KeyError: 'k'"
    assert "raise error" in error.traceback_text
    assert error.__notes__ == [f"rank 2 raised it here:\n{error.traceback_text.rstrip()}"]


@pytest.mark.parametrize("original", [StopIteration(1), StopAsyncIteration(), asyncio.CancelledError()])
def test_control_flow_is_not_impersonated(original):
    """An exception that Python itself acts upon arrives as a plain RemoteError."""
    error = remote_error(raised(original), rank=0, method="work")
    assert not isinstance(error, type(original))
    assert type(original).__name__ in str(error)
    assert isinstance(pickle.loads(pickle.dumps(error)), RemoteError)


def test_a_type_that_is_unknown_here_does_not_hide_the_error():
    """A class that only the worker can import leaves a RemoteError that names it."""
    local = type("Local", (Exception,), {"__module__": "only_in_the_worker"})
    error = rebuild(capture(raised(local("why")), rank=0, method="work"))
    assert str(error) == "rank 0, work: only_in_the_worker.Local: why"


def test_a_broken_str_does_not_hide_the_error():
    """Its type and traceback still arrive."""
    error = remote_error(raised(Mute()), rank=0, method="work")
    assert str(error) == f"rank 0, work: {__name__}.Mute: <its __str__ raised RuntimeError>"


def test_errors_of_aexec_pass_unchanged_with_their_rank():
    """They are typed already, and a note says who raised them."""
    original = UnknownMethod("nope", "Worker")
    error = caller_error(original, rank=1, method="nope")
    assert error is original
    assert error.__notes__ == ["raised by nope on rank 1"]
    assert isinstance(caller_error(ValueError(), rank=1, method="work"), AexecError)


def test_errors_of_aexec_depart_as_they_are():
    """With where they come from; others as data that always travels."""
    own = departing(UnknownMethod("nope", "Worker", ()), rank=3, method="nope")
    assert isinstance(own, UnknownMethod)
    assert "raised by nope on rank 3" in own.__notes__
    captured = departing(KeyError("k"), rank=3, method="get")
    assert isinstance(captured, RemoteFailure)
    assert (captured.rank, captured.method, captured.type_path) == (3, "get", "builtins:KeyError")


def test_an_error_of_aexec_that_does_not_pickle_departs_as_data():
    """Each call has an answer."""
    error = ConfigError("bad")
    error.lock = threading.Lock()
    assert isinstance(departing(error, rank=0, method="load"), RemoteFailure)


def test_arguments_that_do_not_fit_show_no_frame_of_ours():
    """Nothing of the method had run: the line of aexec that called it tells its caller nothing."""
    space = {"__name__": "aexec.worker.device"}
    exec("def call(work): work(1)", space)
    with pytest.raises(TypeError) as caught:
        space["call"](lambda: None)
    error = caught.value.with_traceback(caught.value.__traceback__.tb_next)
    text = traceback_text(error)
    assert "File " not in text
    assert "takes 0 positional arguments but 1 was given" in text
