"""Which backend runs the workers: decided from the settings alone. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from aexec.config import ExecutorConfig
from aexec.errors import ConfigError

__all__ = ("PLANNED", "select_backend")

#: Names that will come, and what to do until then.
PLANNED = {
    "external_launcher": "ranks started by torchrun or SLURM",
    "ray": "ranks on a Ray cluster",
}


def select_backend(config: ExecutorConfig, known: Collection[str]) -> str:
    """The name of the backend, or the ``package.module:Class`` that was given.

    Args:
        config: The settings; a ``backend`` that is a class is not for this function.
        known: Names of the backends that are there.

    Raises:
        ConfigError: No such backend; the text lists those there are.
    """
    name = config.backend
    if name is None:
        name = "uni" if config.parallel.world_size == 1 else "mp"
    if not isinstance(name, str):
        raise ConfigError(f"backend is {name!r}: expected {_choices(known)}")
    if ":" in name or name in known:
        return name
    if name in PLANNED:
        raise ConfigError(_not_yet(name, config, known))
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"backend is {name!r}: expected {_choices(known)}{hint}")


def _choices(known: Collection[str]) -> str:
    return f"{', '.join(map(repr, sorted(known)))}, 'package.module:Class', or a WorkerGroup class"


def _not_yet(name: str, config: ExecutorConfig, known: Collection[str]) -> str:
    remedy = "uni" if config.parallel.world_size == 1 else "mp"
    return (
        f"backend {name!r} ({PLANNED[name]}) is not part of this release: take backend={remedy!r}, or bring your own "
        f"class (known: {_choices(known)})"
    )
