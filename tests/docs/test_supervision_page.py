"""The page on supervision shows the tables that the code runs by."""

from __future__ import annotations

import re
from pathlib import Path

from aexec.actor.lifecycle import TRANSITIONS
from aexec.actor.supervision import Directive, Strategy

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "supervision.md"


def test_every_table_of_the_page_is_drawn_from_the_code() -> None:
    """Each included file is one that the configuration of the manual writes."""
    written = (PAGE.parents[1] / "conf.py").read_text(encoding="utf-8")
    pages = re.search(r"^for page in \((.*)\):$", written, re.MULTILINE)
    assert pages is not None
    drawn = {name.replace("_", "-") for name in pages[1].split(", ")}
    assert set(re.findall(r"_generated/([a-z-]+)\.md", PAGE.read_text(encoding="utf-8"))) <= drawn


def test_every_strategy_and_state_event_is_in_prose_or_table() -> None:
    """Nothing that a user may set is left out of the contract."""
    text = PAGE.read_text(encoding="utf-8")
    assert [strategy for strategy in Strategy.__args__ if f"`{strategy}`" not in text] == []
    assert all(TRANSITIONS.values()) is False  # there are final states, and the table has a row for them
    assert Directive.STOP.name in text
