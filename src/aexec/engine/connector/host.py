"""The actor's part of a KV connector: whenever it is detached, attach the ranks; at the end, flush.

The connector itself is asked by the scheduler and never waits. What has to wait is here. The
ranks are asked who they are: they read their weights for it, on a thread beside the steps, which
run on without the connector meanwhile. Then they are attached, between two steps, which takes
no longer than to list what they hold.
"""

from __future__ import annotations

from aexec.actor import Actor, handles
from aexec.engine.connector.attach import attach_ranks
from aexec.engine.connector.base import KVConnector
from aexec.engine.connector.calls import AttachRanks, FlushConnector, RanksAttached, RanksNotAttached
from aexec.engine.recovery import Fate, fate_of
from aexec.engine.scheduler import Scheduler
from aexec.executor.base import Executor
from aexec.messages.batch import SchedulerOutput
from aexec.messages.step import ExecuteModel, StepId

__all__ = ("ConnectorHost",)

_RETRY_SECONDS, _MOST_RETRY_SECONDS = 1.0, 60.0


class ConnectorHost(Actor):
    """What the driver does for the connector of its scheduler, if there is one.

    Args:
        executor: Has the ranks.
        scheduler: Has the connector.
    """

    _step: StepId  # the driver's last

    def __init__(self, executor: Executor, scheduler: Scheduler) -> None:
        self._executor, self._scheduler = executor, scheduler
        self._is_attaching = False
        self._retry = _RETRY_SECONDS

    async def on_start(self) -> None:
        """Attach the ranks, so that the first request finds what was kept.

        Raises:
            ConfigError: The workers have no such connector.
            AexecError: They could not be attached.
        """
        connector = self._connector
        if connector is not None:
            connector.attached(
                connector.epoch, await attach_ranks(self._executor, connector.epoch, afresh=connector.afresh)
            )
            connector.on_detached = self._attach_soon

    @handles(AttachRanks)
    def attach(self, message: AttachRanks) -> None:
        """Ask the ranks, beside the steps."""
        del message
        connector, self._is_attaching = self._connector, True
        assert connector is not None, "it was detached"
        epoch = connector.epoch
        self.context.pipe_to_self(
            attach_ranks(self._executor, epoch, afresh=connector.afresh),
            lambda holdings: RanksAttached(epoch, holdings),
            RanksNotAttached,
        )

    @handles(RanksAttached)
    def ranks_attached(self, message: RanksAttached) -> None:
        """Tell the connector, unless it was detached meanwhile: then attach them once more."""
        connector, self._is_attaching, self._retry = self._connector, False, _RETRY_SECONDS
        assert connector is not None, "it was attached"
        connector.attached(message.epoch, message.holdings)
        if message.epoch != connector.epoch:
            self._attach_soon()

    @handles(RanksNotAttached)
    def ranks_not_attached(self, message: RanksNotAttached) -> None:
        """Try again: they may be down, or asleep; unless they will not come back."""
        if fate_of(message.error, self._executor.state) is Fate.ALL:
            self.context.log.info("the KV connector stays detached", error=str(message.error))
            return
        self.context.log.info("the KV connector is not attached", error=str(message.error), retry=self._retry)
        self.context.after(self._retry, AttachRanks())
        self._retry = min(2 * self._retry, _MOST_RETRY_SECONDS)

    @handles(FlushConnector)
    async def flush_connector(self, message: FlushConnector) -> int:
        """Have the ranks store what the cache holds; no step may be in flight."""
        del message
        connector, count = self._connector, 0
        if connector is None:
            return 0
        for transfer in connector.flush(self._scheduler.cached_blocks()):
            self._step = StepId(self._step + 1)
            await self._executor.execute_model(ExecuteModel(self._step, SchedulerOutput(kv_transfer=transfer), 0))
            count += len(transfer.store_keys)
        return count

    def connector_statistics(self) -> object:
        """The connector in numbers; None: there is none."""
        return None if self._connector is None else self._connector.statistics()

    @property
    def _connector(self) -> KVConnector | None:
        return self._scheduler.connector

    def _attach_soon(self) -> None:
        """After what is going on now, which may detach it more than once."""
        if not self._is_attaching:
            self._is_attaching = True
            self.context.after(0.0, AttachRanks())
