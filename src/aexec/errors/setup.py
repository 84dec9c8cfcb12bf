"""You mend the set-up."""

from __future__ import annotations

from aexec.errors.root import AexecError

__all__ = (
    "ConfigError",
    "MissingExtra",
    "ModelLoadError",
    "ModelNotFound",
    "OutOfMemory",
    "PlacementFailed",
    "UnsupportedModel",
)


class ConfigError(AexecError, ValueError):
    """A setting is wrong; the text names the value, what was expected and the remedy."""


class MissingExtra(ConfigError):
    """An optional dependency is not installed.

    Attributes:
        what: What needs it, as in "the torch model runner".
        extra: The extra that brings it, as in ``models``.
    """

    def __init__(self, what: str, extra: str, missing: str = "") -> None:
        super().__init__(what, extra, missing)
        self.what, self.extra, self.missing = what, extra, missing

    def __str__(self) -> str:
        because = f" ({self.missing} is not installed)" if self.missing else ""
        return f"{self.what} needs the extra {self.extra!r}{because}: pip install 'aexec[{self.extra}]'"


class ModelNotFound(ConfigError):
    """A model name or directory leads nowhere."""


class UnsupportedModel(ConfigError):
    """The model is readable, and its architecture is not one that aexec has tested."""


class ModelLoadError(AexecError):
    """The model's files are damaged or incomplete; no weight is ever left random."""


class OutOfMemory(AexecError, MemoryError):
    """Something does not fit.

    Attributes:
        what: What does not fit.
        need_bytes: Bytes it takes.
        have_bytes: Bytes there are.
        remedy: What to change.
    """

    def __init__(self, what: str, need_bytes: int, have_bytes: int, remedy: str) -> None:
        super().__init__(what, need_bytes, have_bytes, remedy)
        self.what, self.need_bytes, self.have_bytes, self.remedy = what, need_bytes, have_bytes, remedy

    def __str__(self) -> str:
        unit, name = (2**20, "MiB") if self.need_bytes >= 2**20 else (2**10, "KiB")
        need, have = self.need_bytes / unit, self.have_bytes / unit
        return f"{self.what} needs {need:,.1f} {name} and {have:,.1f} {name} are available: {self.remedy}"


class PlacementFailed(AexecError, TimeoutError):
    """Ray has not placed the workers within ``placement_timeout``.

    Attributes:
        timeout: The limit, seconds.
        details: What was wanted against what each node has; several lines.
        never: No node, or all of them together, will ever have enough as the cluster is.
    """

    def __init__(self, timeout: float, details: str, never: bool) -> None:
        super().__init__(timeout, details, never)
        self.timeout, self.details, self.never = timeout, details, never

    def __str__(self) -> str:
        return f"the placement group has not come within {self.timeout:g} s (placement_timeout); {self.details}"
