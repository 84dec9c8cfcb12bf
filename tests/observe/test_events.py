from __future__ import annotations

import logging

import pytest

from aexec.observe import RequestFinished, get_logger, log_event

FINISHED = RequestFinished(
    request_id="r-1",
    num_prompt_tokens=5,
    num_completion_tokens=8,
    finish_reason="length",
    first_token_seconds=0.1,
    seconds=2.0,
)


def test_an_event_is_logged_under_its_name_with_all_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    """A record's class is the event, its fields are the facts."""
    caplog.set_level(logging.INFO, "aexec")
    log_event(get_logger(), FINISHED)
    assert caplog.records[0].aexec["event"] == "request finished"
    assert caplog.records[0].aexec["num_completion_tokens"] == 8


def test_tokens_per_second_are_over_the_request_s_whole_life() -> None:
    """Eight tokens in two seconds are four a second."""
    assert FINISHED.tokens_per_second == 4.0
