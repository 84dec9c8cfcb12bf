"""Sphinx configuration, and the pages that are made from the code's own tables."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Sequence
from pathlib import Path

from sphinx.application import Sphinx

from aexec import environ
from aexec.actor.lifecycle import TRANSITIONS as LIFE
from aexec.actor.lifecycle import LifecycleEvent
from aexec.actor.supervision import UNSUPERVISED, Directive
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


def environment() -> str:
    """Return the environment variables, each with its default and its prose."""
    rows = ((f"`{variable.name}`", f"`{variable.default}`", variable.prose) for variable in environ.VARIABLES)
    return table(("variable", "default", "what it is for"), rows)


def setup(app: Sphinx) -> None:
    """Leave out what NamedTuple says of its fields: the class's docstring says it better."""

    def skip(_app: object, _what: str, _name: str, member: object, *_: object) -> bool | None:
        return True if str(getattr(member, "__doc__", "")).startswith("Alias for field number") else None

    app.connect("autodoc-skip-member", skip)


GENERATED.mkdir(exist_ok=True)
for page in (step_states, actor_states, directives, unsupervised, environment):
    (GENERATED / f"{page.__name__.replace('_', '-')}.md").write_text(page(), encoding="utf-8")
