"""The worker that Ray's bench places; workers import it from here."""

from __future__ import annotations

import os
import time
from typing import Any

from aexec import ExecuteModel, StepId, WorkerContext
from aexec.messages import GrammarOutput
from aexec.parallel import RankLayout

__all__ = ("StageSubject",)


class StageSubject:
    """Hands hidden states of a given size from stage to stage; ``payload`` says the size, in bytes, or to hang."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.layout = RankLayout.of_replica(context.config.parallel)
        self.link: Any = context.stage_link

    def meet(self) -> None:
        """Where the steps do not carry hidden states, as the worker that ships does it; torch is loaded in any case."""
        import torch

        torch.set_num_threads(1)
        if self.link is None and self.layout.pipeline > 1:
            from aexec.parallel.groups import open_groups
            from aexec.parallel.transfer import TensorLink

            place = self.context.distributed_init_method
            groups = open_groups(self.layout, self.context.rank, init_method=place, device="cpu", timeout=60.0)
            self.link = TensorLink(groups)

    def execute_model(self, step: ExecuteModel) -> None:
        """The forward pass of nothing."""
        if step.payload == "hang":
            time.sleep(60)
        elif step.payload and self.layout.pipeline > 1:
            self._pass_on(step.step, step.payload)

    def sample_tokens(self, step: StepId, grammar: GrammarOutput | None) -> list[int]:  # noqa: ARG002
        """A token."""
        return [step]

    def pid(self) -> int:
        """Whom to measure, or to kill."""
        return os.getpid()

    def _pass_on(self, step: int, num_bytes: int) -> None:
        import torch

        hidden: Any = torch.empty(1, 1, num_bytes // 4)
        if self.context.pp_rank:
            hidden = self.link.receive(step, hidden)
        if self.context.pp_rank < self.layout.pipeline - 1:
            self.link.send(step, hidden)
