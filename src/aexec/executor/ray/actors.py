"""Actors in their bundles, named for the ranks that they are to be, and what they say of themselves."""

from __future__ import annotations

import asyncio
import platform
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aexec.config import ExecutorConfig
from aexec.errors import AexecError, ConfigError, ProtocolError, WorkerDied
from aexec.executor.ray.api import answer, ray, system_errors, task_error
from aexec.executor.ray.health import ray_says
from aexec.executor.ray.placement import Placement
from aexec.executor.ray.worker_actor import VERSION, ActorFacts, RayWorker
from aexec.parallel.layout import coordinates

__all__ = ("LIFE", "actor_names", "gather", "make_actors", "runtime_env")

#: The concurrency group of the call that lasts for a worker's life: it holds up no other, nor those of Ray itself.
LIFE = "life"
_NSIGHT = {"t": "cuda,cudnn,cublas,nvtx", "o": "'worker_process_%p'", "cuda-graph-trace": "node"}


def actor_names(config: ExecutorConfig, generation: int, order: Sequence[int]) -> list[str]:
    """A name for each actor, by its place among the bundles; no other group has one: ``aexec-3fa2-g1-pp0-tp1``.

    Args:
        config: The settings.
        generation: Of the group.
        order: By rank: its place among the bundles, as far as that can be told before the actors live.
    """
    group = f"aexec-{secrets.token_hex(2)}-g{generation}"
    names = [""] * len(order)
    for rank, place in enumerate(order):
        pp_rank, tp_rank = coordinates(rank, config.parallel)
        names[place] = f"{group}-pp{pp_rank}-tp{tp_rank}"
    return names


def runtime_env(config: ExecutorConfig) -> dict[str, Any]:
    """Ray's ``runtime_env`` of the workers."""
    env = dict(config.ray_runtime_env)
    if config.ray_nsight:
        given: Mapping[str, str] = config.ray_nsight if isinstance(config.ray_nsight, Mapping) else {}
        env["nsight"] = {**_NSIGHT, **given}
    return env


def make_actors(config: ExecutorConfig, placement: Placement, names: Sequence[str], into: list[Any]) -> None:
    """Ask Ray for one actor in each bundle; they come to life by themselves. It blocks for milliseconds each.

    Args:
        config: The settings.
        placement: Where.
        names: By place among the bundles.
        into: Where the handles go, as they come.
    """
    make = ray().remote(concurrency_groups={LIFE: 1})(RayWorker)
    env = runtime_env(config)
    for index, name in enumerate(names):
        options = {"name": name, "max_restarts": 0, **placement.options(index)}
        if env:
            options["runtime_env"] = env
        into.append(make.options(**options).remote(name))


async def gather(actors: Sequence[Any], heard: Callable[[int], None], *, for_graph: bool) -> list[ActorFacts]:
    """What all actors say of themselves, once they live.

    Args:
        actors: In any order.
        heard: Told of each that has answered.
        for_graph: See ``RayWorker.facts``.

    Raises:
        AexecError: One cannot live; names its place and why.
    """

    async def one(index: int, actor: Any) -> ActorFacts:
        try:
            facts: ActorFacts = await answer(actor.facts.remote(for_graph=for_graph))
        except system_errors() as error:
            raise _no_actor(index, error) from None
        heard(index)
        return _checked(facts)

    tasks = [asyncio.ensure_future(one(index, actor)) for index, actor in enumerate(actors)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _checked(facts: ActorFacts) -> ActorFacts:
    ours, theirs = (VERSION, platform.python_version()), (facts.aexec, facts.python)
    if ours[0] != theirs[0]:
        raise ConfigError(
            f"node {facts.place.node_ip} ({facts.host}) has aexec {theirs[0]}, and the driver has {ours[0]}: install the "
            f"same on both, or have Ray do that with ray_runtime_env={{'pip': ['aexec=={ours[0]}']}}"
        )
    return facts


def _no_actor(index: int, error: Exception) -> AexecError:
    """Why an actor did not come to life, in words that say what to do."""
    errors = ray().exceptions
    cause: object = getattr(error, "cause", error)
    text = str(error).strip()
    if isinstance(error, errors.RuntimeEnvSetupError):
        return ConfigError(
            f"Ray could not set up ExecutorConfig.ray_runtime_env for the worker in bundle {index}: {text}"
        )
    if isinstance(cause, ModuleNotFoundError) or "ModuleNotFoundError" in text:
        return ConfigError(
            f"the worker in bundle {index} could not import what it is made of: is aexec {VERSION} installed on "
            f"its node? {text}"
        )
    if isinstance(error, task_error()):
        return ProtocolError(f"the actor in bundle {index} could not say where it is: {cause!r}")
    if isinstance(error, errors.RayActorError):
        how = ray_says(error)
        pid = int(getattr(error, "pid", 0) or 0)
        return WorkerDied(index, pid, how.code, how.signal, "actor", cause=how.cause or text)
    return ProtocolError(f"Ray could not make the actor in bundle {index}: {type(error).__name__}: {text}")
