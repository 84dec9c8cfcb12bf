"""Which backend runs the workers: decided from the settings, and from what this machine has. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from aexec.config import ExecutorConfig, ModelConfig
from aexec.errors import ConfigError
from aexec.model.dummy.settings import is_dummy

__all__ = ("select_backend",)


def select_backend(config: ExecutorConfig, known: Collection[str], *, devices: int = 0, has_ray: bool = False) -> str:
    """The name of the backend, or the ``package.module:Class`` that was given.

    Where none is named: one rank stays in this process, several get processes of this machine,
    and ``ray`` places them if there are more ranks than devices here, or if one of its own
    settings was given.

    Args:
        config: The settings; a ``backend`` that is a class is not for this function.
        known: Names of the backends that are there.
        devices: Accelerators that this process sees; 0: ranks share the CPUs, however many.
        has_ray: Ray is installed.

    Raises:
        ConfigError: No such backend; the text lists those there are. Or the one that it takes is not installed.
    """
    name = config.backend
    if name is None:
        return _choose(config, devices, has_ray=has_ray)
    if not isinstance(name, str):
        raise ConfigError(f"backend is {name!r}: expected {_choices(known)}")
    if ":" in name or name in known:
        return name
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"backend is {name!r}: expected {_choices(known)}{hint}")


def _choose(config: ExecutorConfig, devices: int, *, has_ray: bool) -> str:
    ranks = config.parallel.world_size
    given = config.ray_settings()
    if config.nnodes > 1:
        return "mp"
    if given:
        why = f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} given, and only Ray knows what to do with that"
        otherwise = f"leave {'it' if len(given) == 1 else 'them'} out"
    elif 0 < devices < ranks and _takes_devices(config):
        why = f"there are {ranks} ranks, and this machine has {devices} device{'s' * (devices > 1)}"
        otherwise = "take fewer ranks, or say backend='mp', whose ranks then share what there is"
    else:
        return "uni" if ranks == 1 else "mp"
    if has_ray:
        return "ray"
    raise ConfigError(
        f"{why}: that takes backend 'ray', and Ray is not installed: pip install 'aexec[ray]'; or {otherwise}"
    )


def _takes_devices(config: ExecutorConfig) -> bool:
    """False where it is known that the workers take none."""
    model = config.worker_kwargs.get("model_config")
    return not (isinstance(model, ModelConfig) and (model.device == "cpu" or is_dummy(model.model)))


def _choices(known: Collection[str]) -> str:
    return f"{', '.join(map(repr, sorted(known)))}, 'package.module:Class', or a WorkerGroup class"
