"""What has to be the same on all ranks before the first request, or may not be at all."""

from __future__ import annotations

import dataclasses
import secrets
import sys
from collections.abc import Callable

from aexec.config import CacheConfig, StructuredOutputConfig
from aexec.errors import ConfigError
from aexec.executor.base import Executor

__all__ = ("is_replicated", "prepare")

_A_DAY = 86_400.0


def is_replicated(executor: Executor) -> bool:
    """Each rank's process has an executor of its own, and an engine."""
    return getattr(executor, "is_replicated", False)


async def prepare(
    executor: Executor, cache: CacheConfig, structured: StructuredOutputConfig, reseed: Callable[[int], None] | None
) -> StructuredOutputConfig:
    """Refuse what would make ranks decide by their clocks, and have them draw the same seeds.

    Args:
        executor: The replicated one.
        cache: A connector's ranks are attached beside the steps, whenever they are ready.
        structured: Its limits in seconds, and that of compilations under way, would refuse on one
            rank what another one takes.
        reseed: Takes the number from which seeds follow; None: the user's own is the same on all ranks.

    Returns:
        ``structured`` without the limits that no rank may apply by itself. That of a compilation
        is kept, as all ranks are told of it.

    Raises:
        ConfigError: There is a KV connector.
    """
    if cache.connector is not None:
        raise ConfigError(
            f"kv_connector is {cache.connector!r}, and every rank has an engine of its own here: which blocks a connector "
            "holds, and from when on, is a matter of time that may differ from rank to rank; leave it out, or take "
            "executor='mp' or 'ray'"
        )
    if reseed is not None:
        drawn = await executor.collective_rpc(_draw)  # all ranks get the replies of all
        reseed(drawn[0])
    return dataclasses.replace(structured, mask_timeout=_A_DAY, max_num_compiling=sys.maxsize)


def _draw(worker: object) -> int:
    """A number from one of the ranks."""
    del worker
    return secrets.randbits(63)
