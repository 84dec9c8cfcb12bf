"""Which bundles the workers take, of which resource, and what such a bundle reserves. Pure.

Everything that is wrong with a given group is told in one report, with a table of its bundles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aexec.config import ExecutorConfig
from aexec.config.ray import DEVICES
from aexec.errors import ConfigError
from aexec.executor.ray.capacity import resources_text

__all__ = ("choose_bundles", "demand", "new_bundles", "resource_of")

_SLACK = 1e-6


def resource_of(config: ExecutorConfig, at_hand: Iterable[str]) -> str:
    """What a worker takes, as Ray counts it.

    Args:
        config: The settings.
        at_hand: Names of resources that there are: the given group's, else the cluster's.
    """
    asked = config.ray_resource
    if asked is None:
        return "GPU" if "GPU" in at_hand else "CPU"
    return "GPU" if asked == "XPU" else asked


def new_bundles(config: ExecutorConfig, resource: str) -> tuple[dict[str, float], ...]:
    """The bundles of a group of our own, one for each rank."""
    bundle = {resource: config.ray_resource_per_worker}
    for name, amount in config.ray_bundle_resources.items():
        bundle[name] = bundle.get(name, 0.0) + amount
    return tuple(dict(bundle) for _ in range(config.parallel.world_size))


def demand(resource: str, amount: float) -> dict[str, Any]:
    """What an actor asks of its bundle, as options of Ray.

    CPUs are the bundle's alone: whoever has the group (a replica of Ray Serve, say) may sit in
    it too, and an actor that waits for a CPU there would wait for ever.
    """
    if resource == "CPU":
        return {"num_cpus": 0}
    if resource == "GPU":
        return {"num_cpus": 0, "num_gpus": amount}
    return {"num_cpus": 0, "resources": {resource: amount}}


def choose_bundles(
    config: ExecutorConfig, bundles: Mapping[int, Mapping[str, float]], resource: str
) -> tuple[int, ...]:
    """The bundles of a given group that the workers take, in the order of ranks.

    Args:
        config: The settings.
        bundles: What each reserves, by its index.
        resource: See :func:`resource_of`.

    Raises:
        ConfigError: There are too few, or the settings name wrong ones; lists all that is wrong.
    """
    wanted, amount = config.parallel.world_size, config.ray_resource_per_worker
    fit = [index for index in sorted(bundles) if bundles[index].get(resource, 0.0) >= amount - _SLACK]
    if config.bundle_indices is None:
        chosen, wrong = tuple(fit[:wanted]), _too_few(len(fit), wanted, resource, amount)
    else:
        chosen = tuple(config.bundle_indices)
        wrong = [*_wrong_indices(chosen, bundles, wanted), *_too_small(chosen, bundles, fit, resource, amount)]
    wrong += _too_many_devices(chosen, bundles, resource)
    if wrong:
        rows = "\n".join(f"  {index:>6}  {{{resources_text(bundles[index])}}}" for index in sorted(bundles))
        raise ConfigError(
            f"the placement group cannot hold {wanted} {'rank' if wanted == 1 else 'ranks'}: {'; '.join(wrong)}. "
            f"Its bundles:\n{rows or '  none'}"
        )
    return chosen


def _too_few(number: int, wanted: int, resource: str, amount: float) -> list[str]:
    if number >= wanted:
        return []
    return [f"{number} of its bundles have {resource}: {amount:g} (ray_resource, ray_resource_per_worker)"]


def _wrong_indices(chosen: Sequence[int], bundles: Mapping[int, object], wanted: int) -> list[str]:
    wrong: list[str] = []
    if len(chosen) != wanted:
        wrong.append(f"bundle_indices names {len(chosen)} bundles")
    twice = sorted(index for index, count in Counter(chosen).items() if count > 1)
    if twice:
        wrong.append(f"bundle_indices names {_listed(twice)} more than once")
    absent = sorted(set(chosen) - bundles.keys())
    if absent:
        wrong.append(f"it has no bundle {_listed(absent)}")
    return wrong


def _too_small(
    chosen: Iterable[int], bundles: Mapping[int, object], fit: Sequence[int], resource: str, amount: float
) -> list[str]:
    small = sorted({index for index in chosen if index in bundles and index not in fit})
    return [f"bundle {_listed(small)} has less than {resource}: {amount:g}"] if small else []


def _too_many_devices(chosen: Iterable[int], bundles: Mapping[int, Mapping[str, float]], resource: str) -> list[str]:
    if resource not in DEVICES:
        return []
    big = sorted({index for index in chosen if bundles.get(index, {}).get(resource, 0.0) > 1})
    return [f"bundle {_listed(big)} has more than one {resource}, and is for one rank"] if big else []


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
