"""Sphinx configuration, and the pages that are made from the code's own tables."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path

from sphinx.application import Sphinx

from aexec import environ
from aexec.actor.lifecycle import TRANSITIONS as LIFE
from aexec.actor.lifecycle import LifecycleEvent
from aexec.actor.supervision import UNSUPERVISED, Directive
from aexec.engine import overlap
from aexec.engine.inflight import FlightState
from aexec.engine.recovery import Fate
from aexec.engine.request import FINISH_REASONS, RequestStatus
from aexec.engine.request import TRANSITIONS as REQUEST
from aexec.executor.lifecycle import TRANSITIONS as EXECUTOR
from aexec.messages.step import TRANSITIONS, StepEvent

project = "aexec"
author = "the aexec authors"
copyright = "2026, the aexec authors"
release = version = importlib.metadata.version("aexec")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "_generated"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"aexec {release}"
html_static_path = ["_static"]

autodoc_class_signature = "separated"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_use_ivar = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!aexec\.).*"),  # other projects' names are not looked up: a build needs no network
    ("py:.*", r"aexec\..*\.[A-Z](_co)?"),  # type variables
    ("py:.*", r"aexec\.(actor|engine|testing|transport)\..*"),  # the inside of a room, seen in a signature
]

GENERATED = Path(__file__).parent / "_generated"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def step_states() -> str:
    """Return the state machine of a step: state, event, next state."""
    return table(
        ("state", *(event.value for event in StepEvent)),
        (
            (f"**{state.value}**", *(moves[event].value if event in moves else "error" for event in StepEvent))
            for state, moves in TRANSITIONS.items()
        ),
    )


def actor_states() -> str:
    """Return the state machine of an actor: state, event, next state."""
    return table(
        ("state", *(event.name.lower() for event in LifecycleEvent)),
        (
            (f"**{state.value}**", *(moves[event].value if event in moves else "" for event in LifecycleEvent))
            for state, moves in LIFE.items()
        ),
    ) + "".join(f"\n* *{event.name.lower()}*: {event.value}" for event in LifecycleEvent)


def directives() -> str:
    """Return what a supervisor may say."""
    return table(("directive", "what it does"), ((f"`{one.name}`", one.value) for one in Directive))


def unsupervised() -> str:
    """Return what becomes of failures that nobody has decided about."""
    return table(("what failed", "directive"), ((what.value, f"`{one.name}`") for what, one in UNSUPERVISED.items()))


def executor_states() -> str:
    """Return the state machine of an executor: state, what happens, next state."""
    moves = ((state, event, after) for state, each in EXECUTOR.items() for event, after in each.items())
    return table(
        ("state", "what happens", "next"),
        ((f"**{state.value}**", event.value, after.value) for state, event, after in moves),
    )


def request_states() -> str:
    """Return the state machine of a request: state, what may follow, what its stream says then."""
    return table(
        ("state", "may become", "the stream"),
        (
            (f"**{state.value}**", ", ".join(after.value for after in RequestStatus if after in moves), told(state))
            for state, moves in REQUEST.items()
        ),
    )


def told(state: RequestStatus) -> str:
    """Return how a stream ends in ``state``."""
    if REQUEST[state]:
        return ""
    return f"ends: `{FINISH_REASONS[state]}`" if state in FINISH_REASONS else "raises"


def flight_states() -> str:
    """Return how far a step in flight can have come; the words beside each state are its comment."""
    lines = inspect.getsource(FlightState).splitlines()
    rows = (line.partition("  # ") for line in lines if "  # " in line)
    return table(("state", "meaning"), ((f"**{code.split()[0].lower()}**", why) for code, _, why in rows))


def fates() -> str:
    """Return what an executor's error can mean for the requests."""
    meanings = (each.value.partition(": ") for each in Fate)
    return table(("the workers", "the requests"), ((what, then or "") for what, _, then in meanings))


def step_loops() -> str:
    """Return the table of the two loops, which the module carries in its docstring."""
    text = str(overlap.__doc__)
    return text[text.index("==") : text.rindex("==") + 2] + "\n"


def environment() -> str:
    """Return the environment variables, each with its default and its prose."""
    rows = ((f"`{variable.name}`", f"`{variable.default}`", variable.prose) for variable in environ.VARIABLES)
    return table(("variable", "default", "what it is for"), rows)


def setup(app: Sphinx) -> None:
    """Leave out what NamedTuple says of its fields, and let napoleon leave our sentences whole.

    The class's docstring says more of a field. Of ``"How many: none yet"`` beside an attribute or a
    property napoleon would make the type "How many" and the text "none yet"; it looks no further than
    the first line.
    """

    def keep_whole(_app: object, what: str, _name: str, _member: object, _options: object, lines: list[str]) -> None:
        if what in {"attribute", "data", "property"}:
            lines[:0] = ["..", ""]  # an empty comment

    def skip(_app: object, _what: str, _name: str, member: object, *_: object) -> bool | None:
        return True if str(getattr(member, "__doc__", "")).startswith("Alias for field number") else None

    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", keep_whole, priority=400)  # before napoleon, at 500


GENERATED.mkdir(exist_ok=True)
for page in (
    step_states,
    actor_states,
    directives,
    unsupervised,
    environment,
    executor_states,
    request_states,
    flight_states,
    fates,
    step_loops,
):
    (GENERATED / f"{page.__name__.replace('_', '-')}.md").write_text(page(), encoding="utf-8")
