"""How a worker class takes a KV connector along with its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from aexec.config import CacheConfig
from aexec.errors import ConfigError
from aexec.messages.batch import ModelRunnerOutput, SchedulerOutput
from aexec.messages.step import StepId
from aexec.model.base import ModelRunner
from aexec.worker.context import WorkerContext
from aexec.worker.kv.base import RankConnector
from aexec.worker.names import load

__all__ = ("connector_of", "make_connector", "reported", "run_step")


def make_connector(config: CacheConfig | None, context: WorkerContext, runner: ModelRunner) -> RankConnector | None:
    """The worker side that the settings name; None: there is no connector.

    Raises:
        ConfigError: The name leads nowhere.
    """
    if config is None or config.connector is None:
        return None
    named = config.connector.worker_side
    worker_side: Any = load(named, "CacheConfig.connector.worker_side") if isinstance(named, str) else named
    made: RankConnector = worker_side(config.connector, context.rank, context.world_size, runner.kv_access)
    return made


def connector_of(connector: RankConnector | None) -> RankConnector:
    """The connector.

    Raises:
        ConfigError: There is none.
    """
    if connector is None:
        raise ConfigError(
            "this worker has no KV connector: open the engine with kv_connector=Offload(...); an executor that was "
            "opened before has its own, cache_config=CacheConfig(connector=Offload(...)) in its worker_kwargs"
        )
    return connector


def run_step(
    connector: RankConnector | None,
    step: StepId,
    batch: SchedulerOutput,
    forward: Callable[[StepId, SchedulerOutput], None],
) -> None:
    """Move what is to be moved, then run the forward pass; when that fails nobody knows what is in the cache.

    Raises:
        Exception: What ``forward`` raised.
    """
    if connector is None:
        forward(step, batch)
        return
    try:
        if batch.kv_transfer is not None:
            connector.move(step, batch.kv_transfer)
        forward(step, batch)
    except BaseException:
        connector.doubt()
        raise


def reported(
    connector: RankConnector | None, step: StepId, output: ModelRunnerOutput | None
) -> ModelRunnerOutput | None:
    """A rank's output of a step, with what its connector has to say."""
    report = connector.take_report(step) if connector is not None else None
    if report is None:
        return output
    return msgspec.structs.replace(output or ModelRunnerOutput(), kv_connector_output=report)
