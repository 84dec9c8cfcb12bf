"""Logs and event records: how to see what aexec does."""

from __future__ import annotations

from aexec.observe.events import Event as Event
from aexec.observe.events import RequestFinished as RequestFinished
from aexec.observe.events import log_event as log_event
from aexec.observe.logs import bind_rank as bind_rank
from aexec.observe.logs import configure_logging as configure_logging
from aexec.observe.logs import get_logger as get_logger
from aexec.observe.logs import log_format as log_format

__all__ = ("Event", "RequestFinished", "bind_rank", "configure_logging", "get_logger", "log_event", "log_format")
