"""The page on supervision shows the tables that the code runs by."""

from __future__ import annotations

from pathlib import Path

from aexec.actor.lifecycle import TRANSITIONS
from aexec.actor.supervision import Directive, Strategy

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "supervision.md"


def test_every_strategy_and_state_event_is_in_prose_or_table() -> None:
    """Nothing that a user may set is left out of the contract."""
    text = PAGE.read_text(encoding="utf-8")
    assert [strategy for strategy in Strategy.__args__ if f"`{strategy}`" not in text] == []
    assert all(TRANSITIONS.values()) is False  # there are final states, and the table has a row for them
    assert Directive.STOP.name in text
