"""The live actors of a system as a tree, for a terminal and for a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from aexec.actor.statistics import ActorStatistics

if TYPE_CHECKING:
    from aexec.actor.cell import Cell

__all__ = ("Tree", "TreeNode", "grow")


class TreeNode(NamedTuple):
    """An actor and its children.

    Attributes:
        kind: Its class.
        figures: Its statistics.
        children: Eldest first.
    """

    kind: str
    figures: ActorStatistics
    children: tuple[TreeNode, ...]

    @property
    def facts(self) -> str:
        """What is worth a look at, in words."""
        figures = self.figures
        facts = [
            figures.state,
            f"{figures.mailbox.queued}/{figures.mailbox.bound} queued",
            f"{figures.handled} handled",
        ]
        facts += [f"{count} {what}" for what in ("failed", "restarts") if (count := getattr(figures, what))]
        if figures.oldest_seconds:
            facts.append(f"oldest {figures.oldest_seconds:.1f} s")
        return ", ".join(facts)


class Tree(NamedTuple):
    """The actors of a system at one moment; prints as text, and shows as HTML in a notebook.

    Attributes:
        system: The system's name.
        roots: The actors at the top, eldest first.
    """

    system: str
    roots: tuple[TreeNode, ...]

    def __str__(self) -> str:
        return "\n".join([self.system, *_lines(self.roots)])

    def __repr__(self) -> str:
        return f"<Tree {self.system}: {_count(self.roots)} actors>"

    def _repr_html_(self) -> str:
        """As nested lists, for a notebook."""
        return f"<div><b>{html.escape(self.system)}</b>{_list(self.roots)}</div>"


def grow(system: str, cells: Iterable[Cell]) -> Tree:
    """The tree of the actors that are not over."""
    return Tree(system, tuple(_node(cell) for cell in cells if cell.parent is None))


def _node(cell: Cell) -> TreeNode:
    children = tuple(_node(child) for child in (cell.children or {}).values())
    return TreeNode(cell.kind, cell.statistics(), children)


def _lines(nodes: tuple[TreeNode, ...], indent: str = "") -> Iterator[str]:
    for node in nodes:
        is_last = node is nodes[-1]
        yield f"{indent}{'└─' if is_last else '├─'} {_plain(node.figures.name)} ({node.kind}): {node.facts}"
        yield from _lines(node.children, indent + ("   " if is_last else "│  "))


def _plain(name: str) -> str:
    """A name without what a terminal would obey."""
    return name if name.isprintable() else ascii(name)


def _list(nodes: tuple[TreeNode, ...]) -> str:
    if not nodes:
        return ""
    items = (
        f"<li><code>{html.escape(node.figures.name)}</code> {html.escape(f'({node.kind}): {node.facts}')}"
        f"{_list(node.children)}</li>"
        for node in nodes
    )
    return f"<ul>{''.join(items)}</ul>"


def _count(nodes: tuple[TreeNode, ...]) -> int:
    return sum(1 + _count(node.children) for node in nodes)
