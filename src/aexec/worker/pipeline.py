"""A rank's part in running one step: take hidden states in, run its layers, hand them on.

The driver sends each step to all stages at once, and nothing of the hidden states goes
through it. A stage does not wait until the next one has taken what it sent, so several
steps are under way at a time, each at another stage, all in the order of their ids.
"""

from __future__ import annotations

import contextlib
from typing import Any

from aexec.errors import PeerLost
from aexec.messages.batch import SchedulerOutput
from aexec.model.base import ModelRunner
from aexec.model.dummy.settings import is_dummy
from aexec.parallel.layout import RankLayout
from aexec.parallel.link import LinkStatistics, StageLink
from aexec.worker.context import WorkerContext

__all__ = ("RankPipeline",)


class RankPipeline:
    """What one rank shares with others, and the way a step takes through it.

    Made on all ranks before :meth:`open` is called on any of them.

    Args:
        context: The rank's place.
        runner: Runs its layers.
        model: Name of the model.
    """

    def __init__(self, context: WorkerContext, runner: ModelRunner, model: str) -> None:
        self._context, self._runner, self._is_dummy = context, runner, is_dummy(model)
        self._layout = RankLayout.of_replica(context.config.parallel)
        self._world = context.world  # of all ranks that meet: there may be other replicas
        self._link: StageLink | None = context.stage_link if self._layout.pipeline > 1 else None
        self._groups: Any = None  # aexec.parallel.groups.Groups, which is loaded with torch only
        if self._is_dummy and self._layout.pipeline > 1 and self._link is None:
            from aexec.parallel.sockets import SocketLink

            self._link = SocketLink(
                self._world,
                context.world_rank,
                init_method=context.distributed_init_method,
                timeout=context.config.distributed_timeout,
                host=context.node_ip,
                secret=context.group_secret,
            )

    def __repr__(self) -> str:
        return f"<RankPipeline stage {self._context.pp_rank} of {self._layout.pipeline}: {self._link!r}>"

    @property
    def groups(self) -> Any:
        """The ``aexec.parallel.groups.Groups`` of this rank; None for a rank alone, or without torch."""
        return self._groups

    def open(self) -> None:
        """Meet the other ranks; blocks until all of them are there.

        Raises:
            PeerLost: They do not come in time.
            ConfigError: There is no place to meet.
        """
        if self._is_dummy:
            if self._link is not None:
                self._link.open()
        elif self._layout.size > 1:
            self._open_groups()

    def run(self, step: int, batch: SchedulerOutput) -> None:
        """Run this rank's share of a step.

        Raises:
            PeerLost: A stage beside is gone, too late, or failed at this step.
            Exception: What the runner raised; the stages after are told that nothing comes.
        """
        num_tokens = batch.total_num_scheduled_tokens
        link = self._link if num_tokens else None
        if link is None:
            self._runner.execute_stage(batch)
            return
        blank = self._runner.blank_hidden(num_tokens)
        try:
            incoming = link.receive(step, blank) if self._context.pp_rank else None
            hidden = self._runner.execute_stage(batch, incoming)
        except Exception:
            if not self._is_last:
                with contextlib.suppress(PeerLost):  # it says less than what is raised here
                    link.send_failure(step, blank)
            raise
        if not self._is_last:
            link.send(step, hidden)

    def statistics(self) -> LinkStatistics:
        """Figures of the links; all zero for a single stage."""
        return self._link.statistics() if self._link is not None else LinkStatistics(0, 0, 0, 0.0)

    def close(self) -> None:
        """Leave the links and the groups."""
        if self._link is not None:
            self._link.close()
        if self._groups is not None:
            self._groups.close()

    @property
    def _is_last(self) -> bool:
        return self._context.pp_rank == self._layout.pipeline - 1

    def _open_groups(self) -> None:
        from aexec.parallel.groups import open_groups

        self._groups = open_groups(
            self._world,
            self._context.world_rank,
            init_method=self._context.distributed_init_method,
            device=self._runner.device,
            timeout=self._context.config.distributed_timeout,
        )
        if self._layout.tensor > 1:
            self._runner.join(self._groups.tensor)
        if self._layout.pipeline > 1 and self._link is None:
            from aexec.parallel.transfer import TensorLink

            self._link = TensorLink(self._groups)
