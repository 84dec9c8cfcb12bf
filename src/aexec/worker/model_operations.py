"""Operations that the worker that ships offers beside steps, each callable by name on all ranks.

As in ``await executor.collective_rpc("sleep", (1,))``. All of them are plain methods, so that
they take their turn between steps, on the thread that owns the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from aexec.messages.operations import NamedTensors, SleepReport, WakeReport, WeightsReport
from aexec.model.base import ModelRunner
from aexec.worker.context import WorkerContext
from aexec.worker.profiler import RankProfiler

__all__ = ("WorkerOperations",)


class WorkerOperations:
    """What a worker class gets that holds a model runner.

    Attributes:
        runner: The model runner.
        context: The rank's place.
        profiler: Writes this rank's traces.
    """

    runner: ModelRunner
    context: WorkerContext
    profiler: RankProfiler

    # ------------------------------------------------------------ memory

    def sleep(self, level: int = 1) -> SleepReport:
        """Give memory back between uses.

        Args:
            level: 1: drop the KV cache and move the weights to host memory; on a CPU they are
                there and stay. 2: discard the weights as well.

        Raises:
            ModelNotReady: A forward pass waits for its sampling, or an update is half done.
        """
        return self.runner.operations.sleep(level)

    def wake_up(self, tags: Iterable[str] | None = None) -> WakeReport:
        """Bring back what sleeps.

        Args:
            tags: ``weights`` or ``kv_cache``, or both; None: both.

        Raises:
            OutOfMemory: The KV cache finds no room any longer.
        """
        return self.runner.operations.wake_up(tags)

    def residency(self) -> WakeReport:
        """What of the model is in memory now."""
        return self.runner.operations.report()

    # ------------------------------------------------------------ weights

    def load_weights(self, path: str | None = None) -> WeightsReport:
        """Load the weights from files, in place of those that are there.

        Args:
            path: A directory with a model of the same shapes; None: the model's own files.

        Raises:
            ConfigError: It holds another model; nothing was changed.
            ModelLoadError: The files are damaged.
            ModelNotReady: The weights are asleep.
        """
        return self.runner.operations.load_weights(path)

    def start_weight_update(self) -> None:
        """Begin an update in chunks; no step runs until it is finished.

        Raises:
            ModelNotReady: The weights are asleep, or an update is under way.
        """
        self.runner.operations.start_weight_update()

    def update_weights(self, named_tensors: NamedTensors, *, partial: bool = False) -> WeightsReport:
        """Take new weights: a chunk after :meth:`start_weight_update`, else a whole update.

        Every rank is given full tensors, and takes its own part of them.

        Args:
            named_tensors: By the names of the ``transformers`` model's ``state_dict()``: a
                mapping, or pairs; over processes a list or a dictionary, as iterators do not travel.
            partial: Of a whole update: leave weights that do not come as they are.

        Raises:
            WeightsMismatch: Names or shapes are wrong, or something is missing.
            ModelNotReady: The weights are asleep.
        """
        return self.runner.operations.update_weights(named_tensors, partial=partial)

    def finish_weight_update(self, *, partial: bool = False) -> WeightsReport:
        """End an update: the next step runs on the new weights and an empty KV cache.

        Args:
            partial: Leave weights that did not come as they are; not after sleep level 2.

        Raises:
            WeightsMismatch: Something is missing; send it and finish again.
            ModelNotReady: No update was started.
        """
        return self.runner.operations.finish_weight_update(partial=partial)

    def cancel_weight_update(self) -> bool:
        """Give an update up; False: weights have changed already, so that it has to be finished."""
        return self.runner.operations.cancel_weight_update()

    def save_sharded_state(self, directory: str) -> str:
        """Write this rank's weights as they are now, to be loaded by a group of the same layout.

        Args:
            directory: The same for all ranks, on a file system that they share; made if it
                is not there.

        Returns:
            The file that this rank wrote.

        Raises:
            ModelNotReady: The weights are not whole.
        """
        return self.runner.operations.save_sharded_state(directory)

    # ------------------------------------------------------------ profiles

    def profile(self, action: Literal["start", "stop"] = "start", directory: str | None = None) -> str:
        """Record what this rank's device thread does, as a Chrome trace.

        Args:
            action: ``start``, or ``stop`` to write the trace.
            directory: Where to; given with ``start``, made if it is not there. None: the
                current directory.

        Returns:
            The path of the trace; it is there after ``stop``.

        Raises:
            ConfigError: The action is unknown, or comes out of turn.
        """
        return self.profiler.run(action, directory)
