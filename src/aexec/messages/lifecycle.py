"""Facts about workers and executors: what events, health reports and dumps are made of."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

__all__ = (
    "GroupRestarted",
    "HealthReport",
    "ModelInfo",
    "RankHealth",
    "RankInfo",
    "RankPlace",
    "RoundResult",
    "SlowCall",
    "WorkerStarted",
)

RankState = Literal["starting", "ready", "stuck", "dead", "stopped"]


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, as the executor sees it now.

    Attributes:
        rank: Global rank.
        pid: Process id.
        node: Name of its node.
        phase: What it is doing, as in ``weights``, ``idle`` or ``execute_model``.
        state: Whether it can be counted on.
    """

    rank: int
    pid: int
    node: str
    phase: str
    state: RankState


class RankPlace(NamedTuple):
    """Where a rank is; for people.

    Attributes:
        rank: Which.
        node: Its node.
        pid: Its process there; 0: it has none yet.
        device: As in ``cuda:0``, or ``auto``: the worker chooses; empty: not known.
    """

    rank: int
    node: str
    pid: int
    device: str


class RoundResult(NamedTuple):
    """What came of a round in which the processes of all ranks have said what they have; see ``Executor.agree``.

    Attributes:
        keys: What all have said, in the order of the first rank.
        lacking: The ranks that have not said it, for each key that only some have.
    """

    keys: list[str]
    lacking: dict[str, list[int]]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine has to know of a loaded model.

    Attributes:
        architecture: Its class, as in ``LlamaForCausalLM``.
        vocab_size: Rows of the output head; token ids are below it.
        max_model_len: Tokens of prompt and output together.
        block_size: Token positions of a KV block.
        num_blocks: KV blocks of this rank, the null block 0 included; 0 before
            ``initialize_cache``.
        block_bytes: Bytes of one block on this rank.
        num_parameters: Parameters that this rank holds.
        dtype: As in ``float32``.
        device: As in ``cpu``.
        peak_memory_bytes: Peak memory of this rank's process (CPU) or device so far.
        resolves_placeholders: Its runner knows what to do with ``messages.batch.PLACEHOLDER``,
            which async scheduling needs.
    """

    architecture: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    block_bytes: int
    num_parameters: int
    dtype: str
    device: str
    peak_memory_bytes: int
    resolves_placeholders: bool = False


class RankHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of one rank's liveness lane.

    Attributes:
        rank: Global rank.
        state: ``alive``, ``stuck`` (the process answers nothing, or one call has been
            running past ``ExecutorConfig.step_timeout``) or ``dead``.
        phase: What its compute thread is doing.
        step: The last step it began; None before the first.
        age: Seconds since that phase began.
    """

    rank: int
    state: Literal["alive", "stuck", "dead"]
    phase: str
    step: int | None
    age: float


class HealthReport(msgspec.Struct, frozen=True, kw_only=True):
    """Health of a worker group; ``bool(report)`` is :attr:`healthy`."""

    generation: int
    ranks: list[RankHealth]

    @property
    def healthy(self) -> bool:
        """True when every rank is alive."""
        return all(rank.state == "alive" for rank in self.ranks)

    def __bool__(self) -> bool:
        """Healthy or not."""
        return self.healthy


class WorkerStarted(msgspec.Struct, frozen=True, kw_only=True):
    """A worker is ready."""

    rank: int
    pid: int
    generation: int


class GroupRestarted(msgspec.Struct, frozen=True, kw_only=True):
    """The group was rebuilt under a new generation after ``reason``, in ``seconds``."""

    generation: int
    reason: str
    seconds: float


class SlowCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call has been pending past ``ExecutorConfig.slow_call``.

    Attributes:
        method: What was called.
        age: Seconds since it was sent.
        missing: Ranks that have not answered, with the phase of each.
        call: The executor's id of the call, as in ``dump()``.
        answered: Ranks that have answered.
        states: Of the missing ranks: ``running``, ``stopped`` (by a signal), ``dead``, or
            ``silent``: its process runs as far as is known, and answers nothing.
    """

    method: str
    age: float
    missing: dict[int, str]
    call: int = 0
    answered: list[int] = []
    states: dict[int, str] = {}
