from __future__ import annotations

import json
import os
import sys

import anyio
import pytest

from aexec.executor.multiproc.output import TAIL, WorkerOutput, forwarder, prefixed

pytestmark = pytest.mark.anyio


class Lines:
    def __init__(self):
        self.seen = []
        self.changed = anyio.Event()

    def __call__(self, label, line):
        self.seen.append((label, line))
        self.changed.set()


@pytest.fixture
async def output():
    lines = Lines()
    reading = WorkerOutput("rank 2 pid 123", lines)
    reading.lines = lines
    yield reading
    reading.close()


async def until(lines, count):
    with anyio.fail_after(5):
        while len(lines.seen) < count:
            lines.changed = anyio.Event()
            await lines.changed.wait()


async def test_each_line_comes_with_its_origin(output):
    """G59: whatever writes it, native code included, from the first line on."""
    os.write(output.write_end, b"one\ntw")
    os.write(output.write_end, b"o\r\n")
    await until(output.lines, 2)
    assert output.lines.seen == [("rank 2 pid 123", "one"), ("rank 2 pid 123", "two")]


async def test_the_last_lines_are_kept(output):
    """For the error that names the death of who wrote them."""
    for number in range(TAIL + 5):
        os.write(output.write_end, b"line %d\n" % number)
    output.drain()
    assert output.tail.splitlines() == [f"line {number}" for number in range(5, TAIL + 5)]


async def test_what_was_written_without_an_end_is_told_at_the_end(output):
    """The last words of a process rarely end with a newline."""
    os.write(output.write_end, b"Fatal")
    output.close()
    assert output.tail == "Fatal"


async def test_an_endless_line_comes_in_pieces(output):
    """Memory is bounded."""
    for _ in range(5):
        os.write(output.write_end, b"x" * 40_000)
        output.drain()
    assert len(output.lines.seen) == 2


async def test_draining_does_not_wait_for_an_end(output):
    """A grandchild may hold the pipe open for as long as it likes."""
    os.write(output.write_end, b"said\n")
    output.drain()
    assert output.tail == "said"


def test_a_json_record_stays_one():
    """G59: the prefix breaks no log that a machine reads."""
    line = json.dumps({"event": "x", "rank": 1})
    assert prefixed("rank 1 pid 7", line) == line
    assert prefixed("rank 1 pid 7", "{not json") == "(rank 1 pid 7) {not json"


def test_lines_go_where_the_setting_says(capsys):
    """To our standard error, or nowhere."""
    forwarder("stderr")("rank 0 pid 1", "hello")
    forwarder("none")("rank 0 pid 1", "nothing")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "(rank 0 pid 1) hello\n")


def test_lines_can_go_to_the_log(caplog):
    """With the origin as a fact of the record."""
    caplog.set_level("INFO", logger="aexec.worker")
    forwarder("log")("rank 0 pid 1", "hello")
    assert caplog.records[0].aexec == {"event": "hello", "worker": "rank 0 pid 1"}


async def test_a_closed_standard_error_is_nobodys_failure(monkeypatch):
    """A daemon may have none."""

    class Closed:
        def write(self, text):
            raise ValueError("I/O operation on closed file")

    monkeypatch.setattr("sys.stderr", Closed())
    forwarder("stderr")("rank 0 pid 1", "hello")
    monkeypatch.setattr("sys.stderr", None)
    forwarder("stderr")("rank 0 pid 1", "hello")


class Closing:
    """Ends the output that it was given, as code that makes a daemon of itself does."""

    def __init__(self, context):
        self.rank = context.rank

    def close_output(self):
        sys.stdout.close()
        return self.rank


async def test_a_worker_that_closed_its_output_ends_as_any_other(opening, capfd, caplog):
    """It says nothing at its end: no traceback, and nothing in the log."""
    async with opening(Closing, worker_output="stderr") as executor:
        assert await executor.collective_rpc("close_output") == [0, 1]
    assert capfd.readouterr().err == ""
    assert [record.message for record in caplog.records if record.levelname != "INFO"] == []
