from __future__ import annotations

import contextvars
import io
import json
import logging
from types import SimpleNamespace

import pytest
import structlog

from aexec.observe import bind_rank, configure_logging, get_logger, log_format

pytestmark = pytest.mark.usefixtures("logging_as_it_was")


def test_facts_are_bound_once_and_in_every_record(caplog: pytest.LogCaptureFixture) -> None:
    """Actor, rank and step stand in the text, and as data beside it."""
    caplog.set_level(logging.INFO, "aexec")
    log = get_logger("aexec.worker", actor="worker-3", rank=3).bind(step=7)
    log.info("step finished", seconds=0.25)
    (record,) = caplog.records
    assert record.getMessage() == "step finished actor=worker-3 rank=3 step=7 seconds=0.25"
    assert record.aexec == {"event": "step finished", "actor": "worker-3", "rank": 3, "step": 7, "seconds": 0.25}
    assert (record.name, record.levelname) == ("aexec.worker", "INFO")


def test_what_the_program_binds_is_in_our_records(caplog: pytest.LogCaptureFixture) -> None:
    """A web request's id, bound with structlog's contextvars, reaches aexec's lines."""
    with structlog.contextvars.bound_contextvars(http_request="r-1"):
        get_logger().warning("slow call")
    assert caplog.messages == ["slow call http_request=r-1"]


def test_a_rank_is_in_each_record_of_its_context_also_the_programs_own(caplog: pytest.LogCaptureFixture) -> None:
    """What binds it without structlog, which a worker imports with its first record, does what structlog's own does."""

    def log() -> dict[str, object]:
        bind_rank(3)
        get_logger().warning("slow call")
        return structlog.contextvars.get_contextvars()

    assert contextvars.copy_context().run(log) == {"rank": 3}
    assert caplog.messages == ["slow call rank=3"]


def test_a_text_with_spaces_or_percent_signs_is_kept_apart(caplog: pytest.LogCaptureFixture) -> None:
    """Values with spaces are quoted, and no percent sign is taken for a format."""
    get_logger(model="two words").warning("100 % of it")
    assert caplog.messages == ["100 % of it model='two words'"]


def test_nothing_is_configured_by_importing() -> None:
    """A library leaves logging to the program: no handler, no level of its own."""
    logger = logging.getLogger("aexec")
    assert (logger.handlers, logger.level, logger.propagate) == ([], logging.NOTSET, True)


def test_a_program_that_configured_structlog_gets_our_records_its_own_way() -> None:
    """Then they pass through its processors, with all that is bound, and past the standard library."""
    seen: list[dict[str, object]] = []

    def keep(_logger: object, method: str, event: dict[str, object]) -> None:
        seen.append({"method": method, **event})
        raise structlog.DropEvent

    log = get_logger("aexec.worker", rank=3)
    structlog.configure(processors=[keep])
    log.bind(step=7).warning("slow call", age=2.5)
    assert seen == [{"method": "warning", "event": "slow call", "rank": 3, "step": 7, "age": 2.5}]


def test_nothing_goes_to_standard_output_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """A program that configures nothing, and prints JSON, say, gets no line of ours in between."""
    get_logger("aexec.actor").error("handler failed")
    assert capsys.readouterr().out == ""


def test_configuring_twice_writes_each_record_once() -> None:
    """The second call replaces what the first one set up."""
    first, second = io.StringIO(), io.StringIO()
    configure_logging("info", "console", first)
    configure_logging("info", "console", second)
    get_logger("aexec.cli").info("ready", model="dummy")
    assert first.getvalue() == ""
    assert second.getvalue().endswith("INFO    aexec.cli: ready model=dummy\n")


def test_json_has_the_facts_under_their_names_and_the_traceback() -> None:
    """Off a terminal a record is one JSON object a line."""
    stream = io.StringIO()
    configure_logging("info", "auto", stream)
    try:
        raise ValueError("no")
    except ValueError:
        get_logger(rank=1).exception("failed", when=object)
    line = json.loads(stream.getvalue())
    assert {"event": "failed", "rank": 1, "level": "error", "logger": "aexec"}.items() <= line.items()
    assert line["traceback"].endswith("ValueError: no\n")


def test_levels_below_the_limit_are_not_shown() -> None:
    """AEXEC_LOG_LEVEL's default shows warnings and worse."""
    stream = io.StringIO()
    configure_logging(None, "console", stream)
    get_logger().info("quiet")
    get_logger().warning("loud")
    assert [line.rpartition(": ")[2] for line in stream.getvalue().splitlines()] == ["loud"]


def test_records_are_for_people_only_on_a_terminal():
    """What is closed, or not there at all, is none; and whoever asks for a form gets it."""
    terminal, closed = io.StringIO(), io.StringIO()
    terminal.isatty = lambda: True
    closed.close()
    tee = SimpleNamespace(isatty=lambda: True)
    assert log_format(tee, "auto") == "console"
    assert [log_format(stream, "auto") for stream in (terminal, io.StringIO(), closed, None)] == [
        "console",
        *3 * ["json"],
    ]
    assert [log_format(None, "console"), log_format(terminal, "json")] == ["console", "json"]
