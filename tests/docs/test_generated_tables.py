"""Tables of the manual that the code runs by are drawn from the code."""

from __future__ import annotations

import re
from pathlib import Path

from aexec.engine.inflight import FlightState
from aexec.engine.overlap import StepLoop, choose_loop
from aexec.engine.request import RequestStatus

DOCS = Path(__file__).parents[2] / "docs"
INCLUDED = re.compile(r"_generated/([a-z-]+)\.md")


def drawn() -> set[str]:
    """Return the names of the pages that the manual's configuration writes."""
    written = (DOCS / "conf.py").read_text(encoding="utf-8")
    pages = re.search(r"^for page in \((.*?)\):$", written, re.MULTILINE | re.DOTALL)
    assert pages is not None
    return {name.strip().replace("_", "-") for name in pages[1].split(",") if name.strip()}


def text_of(page: str) -> str:
    """Return the source of a page."""
    return (DOCS / page).read_text(encoding="utf-8")


def test_every_table_that_is_included_is_drawn_and_every_table_that_is_drawn_is_included() -> None:
    """Nothing is included that is not written anew by each build, and nothing is written for nobody."""
    pages = [path for path in DOCS.rglob("*.md") if "_generated" not in path.parts and "_build" not in path.parts]
    included = {name for path in pages for name in INCLUDED.findall(path.read_text(encoding="utf-8"))}
    assert included == drawn()


def test_pages_about_the_engine_show_its_tables() -> None:
    """The states of a request, the two loops, the states of a step and what errors mean are on their pages."""
    assert "request-states" in INCLUDED.findall(text_of("explanation/request-lifecycle.md"))
    on_the_loop = INCLUDED.findall(text_of("explanation/the-step-loop.md"))
    assert {"flight-states", "step-loops", "fates"} <= set(on_the_loop)


def test_every_state_of_a_step_has_its_meaning_beside_it() -> None:
    """The table of them is made of the comments in the code, so each needs one."""
    source = (DOCS.parent / "src" / "aexec" / "engine" / "inflight.py").read_text(encoding="utf-8")
    assert [state for state in FlightState if f'"{state.value}"  # ' not in source] == []


def test_every_state_of_a_request_is_on_its_page() -> None:
    """The prose of the page speaks of each state in which a request can be while it lives."""
    text = text_of("explanation/request-lifecycle.md").lower()
    living = [state for state in RequestStatus if not state.value.startswith("finished")]
    assert [state for state in living if f"**{state.value}**" not in text] == []


def test_every_reason_against_async_scheduling_is_in_the_guide() -> None:
    """What `llm.async_scheduling` can say is in the table that explains it."""
    text = text_of("how-to/run-on-several-processes.md")
    off: tuple[StepLoop, ...] = (
        choose_loop(False, stages=1, resolves_placeholders=True),
        choose_loop(None, stages=1, resolves_placeholders=False),
        choose_loop(None, stages=2, resolves_placeholders=True),
    )
    assert not any(loop.overlaps for loop in off)
    assert off[0].reason in text
    assert "resolves_placeholders" in off[1].reason
    assert "resolves_placeholders" in text
    assert off[2].reason in text
