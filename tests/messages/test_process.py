"""What processes are told at their start."""

from __future__ import annotations

import msgspec
import pytest

from aexec.config import ExecutorConfig
from aexec.messages.nodes import Begin
from aexec.messages.process import Launch
from aexec.transport import Writer


@pytest.mark.parametrize("kind", [Launch, Begin])
def test_the_bound_of_memory_is_the_settings_and_never_a_messages_own(kind):
    """Whoever leaves it out is told so."""
    assert "arena_bytes" in {each.name for each in msgspec.structs.fields(kind) if each.required}


def test_memory_is_bounded_alike_before_and_after_the_settings_are_known():
    """A process that has heard nothing yet takes what the setting is by default."""
    assert Writer().statistics().limit == ExecutorConfig().arena_bytes
