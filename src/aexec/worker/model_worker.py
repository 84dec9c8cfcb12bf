"""The worker class that ships: one rank of a model, behind a model runner."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

from anyio import CapacityLimiter, to_thread

from aexec.config import CacheConfig, ModelConfig
from aexec.errors import ConfigError
from aexec.messages.batch import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from aexec.messages.kv import KVHoldings
from aexec.messages.lifecycle import ModelInfo
from aexec.messages.step import ExecuteModel, StepId
from aexec.model.base import ModelRunner
from aexec.model.build import build_runner
from aexec.model.dummy.settings import is_dummy
from aexec.parallel.link import LinkStatistics
from aexec.worker.context import WorkerContext
from aexec.worker.kv.steps import connector_of, make_connector, reported, run_step
from aexec.worker.model_operations import WorkerOperations
from aexec.worker.pipeline import RankPipeline
from aexec.worker.profiler import RankProfiler

__all__ = ("ModelWorker",)


class ModelWorker(WorkerOperations):
    """Builds a model runner and forwards to it; ``ExecuteModel.payload`` is a ``SchedulerOutput``.

    Args:
        context: The rank's place.
        model_config: Which model.
        cache_config: Sizes of the KV cache; None takes the defaults.

    Raises:
        MissingExtra: The model needs a package that is not installed.
        ConfigError: The layout is not possible.
    """

    def __init__(
        self, context: WorkerContext, model_config: ModelConfig, cache_config: CacheConfig | None = None
    ) -> None:
        self.context = context
        parallel = context.config.parallel
        self.runner: ModelRunner = build_runner(
            model_config,
            cache_config or CacheConfig(),
            tp_rank=context.tp_rank,
            tp_size=parallel.tensor_parallel_size,
            pp_rank=context.pp_rank,
            pp_size=parallel.pipeline_parallel_size,
            partition=parallel.pipeline_partition,
            device=context.device,
            local_rank=context.local_rank,
            num_local_ranks=context.num_local_ranks,
            progress=context.progress,
        )
        self.pipeline = RankPipeline(context, self.runner, model_config.model)
        self.profiler = RankProfiler(context.rank, context.generation, uses_torch=not is_dummy(model_config.model))
        self.connector = make_connector(cache_config, context, self.runner)

    def __repr__(self) -> str:
        return f"<ModelWorker rank {self.context.rank}: {self.runner!r}>"

    def init_device(self) -> None:
        """Share the cores among the workers of this node, and meet the other ranks.

        In a process of the user's the number of threads is the user's too.

        Raises:
            PeerLost: They do not come in time.
        """
        torch: Any = sys.modules.get("torch")
        if torch is not None and self.context.owns_process and self.context.num_local_ranks > 1:
            share = max(1, len(os.sched_getaffinity(0)) // self.context.num_local_ranks)
            torch.set_num_threads(min(torch.get_num_threads(), share))
        self.pipeline.open()

    def load_model(self) -> None:
        """Load this rank's weights."""
        self.runner.load_model()

    def determine_available_memory(self) -> int:
        """Bytes that the KV cache of this rank may take."""
        return self.runner.determine_available_memory()

    def initialize_cache(self, available_bytes: int) -> None:
        """Allocate the KV cache.

        Args:
            available_bytes: What every rank can spare.
        """
        self.runner.initialize_cache(available_bytes)

    def compile_or_warm_up(self) -> None:
        """Run once what the first request would otherwise pay for."""
        self.runner.compile_or_warm_up()

    def model_info(self) -> ModelInfo:
        """Facts about the model."""
        return self.runner.info()

    def execute_model(self, step: ExecuteModel) -> ModelRunnerOutput | None:
        """Run this rank's share of the forward pass; a step without tokens only updates requests.

        Hidden states come from the stage before and go to the one after, worker to worker.

        Raises:
            ConfigError: The payload is not a ``SchedulerOutput``.
            PeerLost: A stage beside is gone, too late, or failed at this step.
        """
        if not isinstance(step.payload, SchedulerOutput):
            raise ConfigError(
                f"step {step.step} carries {type(step.payload).__name__}: ModelWorker runs a SchedulerOutput; "
                "for payloads of your own bring a worker_cls"
            )
        with self.profiler.span(f"execute_model step {step.step}"):
            run_step(self.connector, step.step, step.payload, self.pipeline.run)
        return reported(self.connector, step.step, ModelRunnerOutput()) if step.num_tokens == 0 else None

    def sample_tokens(self, step_id: StepId, grammar: GrammarOutput | None) -> ModelRunnerOutput | None:
        """Sample the oldest forward pass, which is that of ``step_id``.

        Ranks that keep no logits return None, or what their connector reports.
        """
        if self.context.rank != self.context.output_rank:
            return reported(self.connector, step_id, None)
        with self.profiler.span(f"sample_tokens step {step_id}"):
            return reported(self.connector, step_id, self.runner.sample_tokens(grammar))

    def pipeline_statistics(self) -> LinkStatistics:
        """How much went from stage to stage, and how long this rank stood still for it."""
        return self.pipeline.statistics()

    async def kv_identity(self, *, afresh: bool = False) -> bytes:
        """What the KV of this rank depends on; see ``aexec.worker.kv.base``. It is found out beside the steps."""
        identity = partial(connector_of(self.connector).identity, afresh=afresh)
        return await to_thread.run_sync(identity, limiter=CapacityLimiter(1))

    def kv_attach(self, epoch: int, identities: list[bytes]) -> KVHoldings:
        """Attach this rank's connector; see ``aexec.worker.kv.base``."""
        return connector_of(self.connector).attach(epoch, identities)

    def shutdown(self) -> None:
        """Write what is still recorded, and leave the other ranks."""
        self.profiler.close()
        if self.connector is not None:
            self.connector.close()
        self.pipeline.close()
