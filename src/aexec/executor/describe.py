"""Every setting of an executor, the value that is used, and where it came from. Pure but for the environment.

What people set and what is used differ where a setting leaves a choice, or where a
variable was meant and another one is read (G46); this is the page that tells.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from aexec import environ
from aexec.config import ExecutorConfig
from aexec.messages.lifecycle import RankPlace

__all__ = ("HIDDEN", "Description", "Setting", "describe", "hide")

Source = Literal["argument", "default", "chosen", "environment"]

HIDDEN = "(hidden)"
_ANY_PORT = ("master_port", 0)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|PRIVATE|API_?KEY|ACCESS_KEY|AUTH|COOKIE|(^|_)KEY$", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"://[^/\s:@]*:[^/\s@]+@|\b(sk-|hf_|ghp_|github_pat_|xox[abp]-|AKIA)\w{8,}")


class Setting(NamedTuple):
    """One setting.

    Attributes:
        name: As in ``step_timeout``, ``parallel.tensor_parallel_size`` or ``AEXEC_LOG_LEVEL``.
        value: What is used; what looks like a secret is hidden.
        source: ``argument``: it differs from the default; ``default``; ``chosen``: it was
            left open, and this was chosen; ``environment``: a variable says so.
    """

    name: str
    value: Any
    source: Source


@dataclass(frozen=True, slots=True)
class Description:
    """The settings of an executor; ``str()`` of it is a table.

    Attributes:
        settings: All of them.
        environment: Variables that were sent to the workers; what looks like a secret is hidden.
        places: The node, process and device of each rank, where the backend tells.
    """

    settings: tuple[Setting, ...]
    environment: Mapping[str, str]
    places: tuple[RankPlace, ...] = ()

    def __getitem__(self, name: str) -> Setting:
        """The setting of that name.

        Raises:
            KeyError: There is none.
        """
        found = next((setting for setting in self.settings if setting.name == name), None)
        if found is None:
            raise KeyError(name)
        return found

    def __str__(self) -> str:
        """One setting a line, and one rank."""
        width = max(len(setting.name) for setting in self.settings)
        lines = [f"{setting.name:{width}}  {setting.value!r}  ({setting.source})" for setting in self.settings]
        sent = [f"  {name}={value}" for name, value in self.environment.items()]
        lines += [f"rank {at.rank}: node {at.node}, pid {at.pid}, device {at.device}" for at in self.places]
        return "\n".join([*lines, "sent to the workers:", *(sent or ["  nothing"])])


def describe(
    config: ExecutorConfig, chosen: Mapping[str, Any], sent: Mapping[str, str], places: Sequence[RankPlace] = ()
) -> Description:
    """The description of an executor.

    Args:
        config: Its settings.
        chosen: What is used where they left a choice, by name.
        sent: Variables that its workers were given.
        places: Where each rank is.
    """
    settings = [*_fields(config, "", chosen), *_variables()]
    return Description(tuple(settings), dict(sorted(hide(sent).items())), tuple(places))


def hide(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` for people: those that look like secrets are hidden."""
    return {name: HIDDEN if _is_secret(name, value) else value for name, value in values.items()}


def _fields(owner: Any, prefix: str, chosen: Mapping[str, Any]) -> Iterable[Setting]:
    own = inspect.get_annotations(owner.__class__)  # what a class takes over from another comes after its own
    for field in sorted(dataclasses.fields(owner), key=lambda field: field.name not in own):
        name, value = prefix + field.name, getattr(owner, field.name)
        if dataclasses.is_dataclass(value) and field.name == "parallel":
            yield from _fields(value, f"{name}.", chosen)
        elif name in chosen and (value is None or (name, value) == _ANY_PORT):
            yield Setting(name, chosen[name], "chosen")
        else:
            shown: Any = hide(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else value
            yield Setting(name, shown, "default" if value == _default(field) else "argument")


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _variables() -> Iterable[Setting]:
    for variable in environ.VARIABLES:
        is_set = variable.is_set()
        value = HIDDEN if is_set and _is_secret(variable.name, "") else variable.read()
        yield Setting(variable.name, value, "environment" if is_set else "default")


def _is_secret(name: str, value: object) -> bool:
    return bool(_SECRET.search(name) or (isinstance(value, str) and _SECRET_VALUE.search(value)))
