"""The model on a rank is asleep or half updated, or was given weights that do not fit."""

from __future__ import annotations

from collections.abc import Sequence

from aexec.errors.root import AexecError

__all__ = ("ModelNotReady", "WeightsMismatch")

_SHOWN = 5


class ModelNotReady(AexecError, RuntimeError):
    """The model's weights or its KV cache are not where the call needs them.

    Attributes:
        wanted: What was to be done.
        state: What is in the way.
        remedy: What to do first.
    """

    def __init__(self, wanted: str, state: str, remedy: str) -> None:
        super().__init__(wanted, state, remedy)
        self.wanted, self.state, self.remedy = wanted, state, remedy

    def __str__(self) -> str:
        return f"{self.wanted} was refused: {self.state}; {self.remedy}"


class WeightsMismatch(AexecError, ValueError):
    """Tensors that were to become weights are not those of the model; each is named.

    Attributes:
        unknown: Names that no rank has.
        misshapen: Names with the shape that came and the one that was expected, in words.
        missing: Names that a complete update still lacks.
        state: What the weights are now, and what to do.
    """

    def __init__(
        self,
        unknown: Sequence[str] = (),
        misshapen: Sequence[str] = (),
        missing: Sequence[str] = (),
        state: str = "",
    ) -> None:
        super().__init__(tuple(unknown), tuple(misshapen), tuple(missing), state)
        self.unknown, self.misshapen, self.missing = tuple(unknown), tuple(misshapen), tuple(missing)
        self.state = state

    def __str__(self) -> str:
        parts = (
            _listed("the model has no weight named", self.unknown),
            _listed("wrong shapes:", self.misshapen),
            _listed("still missing:", self.missing),
            self.state,
        )
        return "; ".join(part for part in parts if part)


def _listed(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what} {', '.join(map(str, names[:_SHOWN]))}{more}"
