"""Worker classes that do on demand what real ones do by accident: wait, hang, raise, end."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Any

from aexec.messages.batch import GrammarOutput, KVConnectorOutput, ModelRunnerOutput
from aexec.messages.step import ExecuteModel, StepId
from aexec.worker.compute import cancelled
from aexec.worker.context import WorkerContext

__all__ = ("ConnectorProbeWorker", "ProbeError", "ProbeWorker", "SleepProbeWorker", "StepProbeWorker")

LONGEST_HOLD = 30.0  # seconds: a check that fails before it lets go still ends


class ProbeError(Exception):
    """What :meth:`ProbeWorker.fail` raises: asks for more than a ``RemoteError`` can pass on."""

    def __init__(self, text: str, *, code: int) -> None:
        super().__init__(text)
        self.code = code


class ProbeWorker:
    """A worker without steps.

    Args:
        context: The rank's place.
        fail_in: The method, ``__init__`` or a hook, that raises.
        hang_in: The hook that takes ``seconds``.
        seconds: How long.
    """

    def __init__(self, context: WorkerContext, *, fail_in: str = "", hang_in: str = "", seconds: float = 0.0) -> None:
        self.context = context
        self.log: list[Any] = []
        self._fail_in, self._hang_in, self._seconds = fail_in, hang_in, seconds
        self._let_go = threading.Event()
        self._enter("__init__")

    def init_device(self) -> None:
        """The first hook."""
        self._enter("init_device")

    def load_model(self) -> None:
        """The second hook."""
        self._enter("load_model")

    def determine_available_memory(self) -> int:
        """Another amount on each rank."""
        self._enter("determine_available_memory")
        return 1000 + self.context.rank

    def initialize_cache(self, available_bytes: int) -> None:
        """Told the least of them."""
        self._enter(f"initialize_cache {available_bytes}")

    def compile_or_warm_up(self) -> None:
        """The last hook."""
        self._enter("compile_or_warm_up")

    def echo(self, value: Any) -> Any:
        """The argument."""
        return value

    def place(self) -> tuple[int, int, int, int, int]:
        """Rank, world size, TP and PP rank, generation."""
        here = self.context
        return here.rank, here.world_size, here.tp_rank, here.pp_rank, here.generation

    def note(self, entry: Any) -> None:
        """Add to the log."""
        self.log.append(entry)

    def read_log(self) -> list[Any]:
        """What was done, in order."""
        return list(self.log)

    def block(self, seconds: float, rank: int | None = None, entry: Any = "blocked") -> int:
        """Block the compute thread, on one rank or on all, as a device would."""
        if rank is None or rank == self.context.rank:
            time.sleep(seconds)
        self.log.append(entry)
        return self.context.rank

    def hold(self, rank: int | None = None, entry: Any = "held") -> int:
        """Block the compute thread, on one rank or on all, until :meth:`release`: for half a minute at most."""
        if rank is None or rank == self.context.rank:
            self._let_go.wait(LONGEST_HOLD)
            self._let_go.clear()
        self.log.append(entry)
        return self.context.rank

    async def release(self) -> None:
        """Let go the :meth:`hold` that runs here, or else the next."""
        self._let_go.set()

    def block_in_turn(self, seconds: float) -> None:
        """Block for longer on each rank."""
        time.sleep(seconds * (self.context.rank + 1))

    def block_until_cancelled(self, seconds: float) -> None:
        """Block until nobody waits any longer, and write down whether it was told."""
        give_up = time.monotonic() + seconds
        while not cancelled() and time.monotonic() < give_up:
            time.sleep(0.005)
        self.log.append(cancelled())

    def fail(self, text: str, code: int, rank: int | None = None) -> int:
        """Raise on one rank or on all."""
        if rank is None or rank == self.context.rank:
            raise ProbeError(text, code=code)
        return self.context.rank

    def fail_or_block(self, rank: int, seconds: float) -> None:
        """Raise on one rank while the others hang, as in a collective."""
        if rank == self.context.rank:
            raise ValueError(f"bad value on rank {rank}")
        time.sleep(seconds)

    def end(self, code: int, rank: int | None = None) -> None:
        """End the rank, as ``sys.exit`` in a worker does."""
        if rank is None or rank == self.context.rank:
            sys.exit(code)

    def thread_name(self) -> str:
        """Where plain methods run."""
        return threading.current_thread().name

    async def async_echo(self, value: Any) -> Any:
        """The argument, by way of the loop."""
        await asyncio.sleep(0)
        return value

    async def async_block(self, seconds: float, entry: Any = "waited") -> None:
        """Wait on the loop, and write down how it ended."""
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.log.append(f"{entry} cancelled")
            raise
        self.log.append(entry)

    def _enter(self, entry: str) -> None:
        self.log.append(entry)
        if self._hang_in and entry.startswith(self._hang_in):
            time.sleep(self._seconds)
        if self._fail_in and entry.startswith(self._fail_in):
            raise ProbeError(f"{entry} was told to fail", code=1)


class StepProbeWorker(ProbeWorker):
    """A worker with steps; the payload says what happens: ``seconds``, ``fail``, ``exit``, ``value``."""

    def execute_model(self, step: ExecuteModel) -> Any:
        """The forward pass."""
        order: dict[str, Any] = step.payload or {}
        self.log.append(("execute", step.step))
        time.sleep(order.get("seconds", 0.0))
        if order.get("exit") is not None:
            sys.exit(order["exit"])
        if order.get("fail") is not None and order.get("rank", self.context.rank) == self.context.rank:
            raise ProbeError(order["fail"], code=step.step)
        self.log.append(("executed", step.step))
        return order.get("value")

    def sample_tokens(self, step_id: StepId, grammar: GrammarOutput | None) -> Any:
        """The sampling: whose it is, on which rank, and what the bitmask held."""
        self.log.append(("sample", step_id))
        return step_id, self.context.rank, None if grammar is None else grammar.bitmask.tolist()


class SleepProbeWorker(StepProbeWorker):
    """A worker with weights that can be put to sleep, woken up and replaced; it tells what it was told."""

    def sleep(self, level: int) -> str:
        """Write it down."""
        self.log.append(("sleep", level))
        return f"asleep at level {level}"

    def wake_up(self, tags: list[str] | None) -> str:
        """Write it down."""
        self.log.append(("wake_up", None if tags is None else tuple(tags)))
        return "awake"

    def update_weights(self, version: int, fail_on: int | None = None) -> int:
        """Take them, or fail on one rank."""
        if fail_on == self.context.rank:
            raise ProbeError(f"version {version} does not fit", code=version)
        self.log.append(("weights", version))
        return version


class ConnectorProbeWorker(StepProbeWorker):
    """A worker with a KV connector: each rank reports request ``r<step>`` a step later than the rank before it."""

    def sample_tokens(self, step_id: StepId, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """The step's tokens, and what this rank's connector reports."""
        rank = self.context.rank
        self.log.append(("sample", step_id, None if grammar is None else len(grammar.request_ids)))
        reported = step_id - rank
        connector = KVConnectorOutput(
            finished_sending=frozenset({f"r{reported}"} if reported > 0 else ()),
            invalid_block_ids=frozenset({rank}),
            stats={"ranks": 1.0},
        )
        return ModelRunnerOutput(
            request_ids=[f"r{step_id}"], sampled_token_ids=[[step_id]], kv_connector_output=connector
        )
