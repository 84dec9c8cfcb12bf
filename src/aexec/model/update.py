"""An update of weights in chunks: what came, what is missing, what is not of this model. Pure.

Any rank is given every tensor of the whole model, under the names that ``transformers``
gives them. It takes its own part and passes over what other pipeline stages have; a name
that no stage has is an error, and so is a complete update that lacks something.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from aexec.errors import WeightsMismatch

__all__ = ("Inventory", "WeightUpdate")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Inventory:
    """The weights of a model, and those of one rank.

    Attributes:
        shapes: All names of the whole model, and their full shapes.
        own: Names that this rank holds, or holds a slice of.
        twins: Names that are one and the same tensor, as a tied head and the embedding.
    """

    shapes: Mapping[str, Shape]
    own: frozenset[str]
    twins: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])

    def targets(self, name: str) -> list[str]:
        """This rank's weights that take the tensor of ``name``: itself, and those tied to it."""
        return [each for each in sorted({name, *self.twins.get(name, ())}) if each in self.own]


class WeightUpdate:
    """One update, from its start to its end.

    Args:
        inventory: Of the rank.
    """

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._applied: dict[str, None] = {}  # in order
        self._elsewhere: set[str] = set()
        self._filled: set[str] = set()

    def __repr__(self) -> str:
        return f"<WeightUpdate: {len(self._filled)} of {len(self._inventory.own)} weights>"

    @property
    def applied(self) -> tuple[str, ...]:
        """Names that went into weights of this rank."""
        return tuple(self._applied)

    @property
    def elsewhere(self) -> int:
        """How many names belong to other stages."""
        return len(self._elsewhere)

    @property
    def is_untouched(self) -> bool:
        """True while no weight of this rank has changed."""
        return not self._filled

    def check(self, chunk: Iterable[tuple[str, Shape]], state: str) -> None:
        """Refuse a chunk that has anything wrong in it; ``state`` says what that leaves behind.

        Raises:
            WeightsMismatch: It names the names and the shapes.
        """
        unknown: list[str] = []
        misshapen: list[str] = []
        for name, shape in chunk:
            expected = self._inventory.shapes.get(name)
            if expected is None:
                unknown.append(name)
            elif shape != expected:
                misshapen.append(f"{name} is {list(shape)}, expected {list(expected)}")
        if unknown or misshapen:
            raise WeightsMismatch(unknown, misshapen, state=state)

    def take(self, name: str) -> list[str]:
        """Note that the tensor of ``name`` is here; returns this rank's weights that it fills."""
        targets = self._inventory.targets(name)
        if targets:
            self._applied[name] = None
            self._filled.update(targets)
        else:
            self._elsewhere.add(name)
        return targets

    def missing(self) -> Sequence[str]:
        """This rank's weights that have not come."""
        return sorted(self._inventory.own - self._filled)
