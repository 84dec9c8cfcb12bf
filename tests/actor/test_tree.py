from __future__ import annotations

import pytest

from aexec.actor import Actor, ActorSystem, handles
from aexec.messages.base import Message

pytestmark = pytest.mark.anyio


class Spawn(Message[None], frozen=True):
    name: str


class Node(Actor):
    @handles(Spawn)
    async def grow(self, message: Spawn) -> None:
        await self.context.using(name=message.name).spawn(Node)


async def test_a_tree_shows_who_is_whose_child(system):
    """Each actor with its class and figures, children below their parents."""
    for name in ("a", "b"):
        await system.using(name=name).spawn(Node)
    await system.find("a", Node).ask(Spawn("c"))
    await system.find("c", Node).ask(Spawn("d"))
    assert str(system.tree()) == (
        "test\n"
        "├─ a (Node): running, 0/256 queued, 1 handled\n"
        "│  └─ c (Node): running, 0/256 queued, 1 handled\n"
        "│     └─ d (Node): running, 0/256 queued, 0 handled\n"
        "└─ b (Node): running, 0/256 queued, 0 handled"
    )
    assert repr(system.tree()) == "<Tree test: 4 actors>"


async def test_names_cannot_break_the_page_or_the_terminal(system):
    """Markup in a name is escaped in HTML, control characters in text."""
    await system.using(name="<b>&\x1b[31m").spawn(Node)
    page = system.tree()._repr_html_()
    assert "<li><code>&lt;b&gt;&amp;" in page
    assert "\x1b" not in str(system.tree())


def test_a_system_that_is_not_open_has_an_empty_tree():
    """It prints its name alone."""
    assert str(ActorSystem(name="new").tree()) == "new"
    assert ActorSystem(name="new").tree()._repr_html_() == "<div><b>new</b></div>"
