"""Makes the scheduler side of a connector, and attaches the ranks to it."""

from __future__ import annotations

import pkgutil
import secrets
from typing import Any

from aexec.config import CacheConfig
from aexec.engine.connector.base import KVConnector
from aexec.errors import ConfigError
from aexec.executor.base import Executor
from aexec.messages.kv import KVHoldings

__all__ = ("SESSION_BYTES", "attach_ranks", "make_connector")

SESSION_BYTES = 4
_ATTACH_SECONDS = 300.0  # the ranks read their weights once, and a directory


def make_connector(config: CacheConfig) -> KVConnector | None:
    """The scheduler side that the settings name; None: there is no connector.

    Raises:
        ConfigError: The name leads nowhere.
    """
    if config.connector is None:
        return None
    name = config.connector.scheduler_side
    try:
        scheduler_side: Any = pkgutil.resolve_name(name) if isinstance(name, str) else name
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"CacheConfig.connector.scheduler_side is {name!r}: expected 'package.module:Class' ({error})"
        ) from error
    made: KVConnector = scheduler_side(config.connector, secrets.token_bytes(SESSION_BYTES))
    return made


async def attach_ranks(executor: Executor, epoch: int, *, afresh: bool) -> list[KVHoldings]:
    """Ask all ranks who they are, and tell each of them.

    Args:
        executor: Whose ranks.
        epoch: The attachment that it is.
        afresh: They have to look at their weights again.

    Returns:
        What each rank holds.

    Raises:
        AexecError: The ranks are not there, or not whole.
    """
    identities = await executor.collective_rpc("kv_identity", (), {"afresh": afresh}, timeout=_ATTACH_SECONDS)
    return await executor.collective_rpc("kv_attach", (epoch, identities), timeout=_ATTACH_SECONDS)
