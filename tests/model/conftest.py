"""Tiny models on disk, runners over them, and a scheduler that is easy to see through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from aexec.config import CacheConfig, ModelConfig
from aexec.messages import CachedRequestData, ModelRunnerOutput, NewRequestData, SamplingParams, SchedulerOutput
from aexec.model.base import ModelRunner
from aexec.model.build import build_runner
from aexec.testing.tiny_models import save_tiny_model

MakeTiny = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> MakeTiny:
    """Saves a tiny model of an architecture, once for each way in which it is asked for."""
    home = tmp_path_factory.mktemp("tiny")
    made: dict[str, Path] = {}

    def make(name: str, **changes: Any) -> Path:
        key = repr((name, sorted(changes.items())))
        if key not in made:
            made[key] = save_tiny_model(name, home / f"{name}-{len(made)}", **changes)
        return made[key]

    return make


def open_runner(model: Path | str, *, num_blocks: int = 64, block_size: int = 16, dtype: str = "float32", **place: int):
    """A runner that is ready for steps."""
    runner = build_runner(
        ModelConfig(model=str(model), dtype=dtype),
        CacheConfig(num_blocks=num_blocks, block_size=block_size),
        device="cpu",
        **place,
    )
    runner.load_model()
    runner.initialize_cache(runner.determine_available_memory())
    runner.compile_or_warm_up()
    return runner


@pytest.fixture(scope="session")
def ready_runner() -> Callable[..., Any]:
    """Opens a runner over a model's directory."""
    return open_runner


@dataclass
class Request:
    """One request of the toy scheduler."""

    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_told: int | None = None  # tokens that the runners know; None: they do not know the request

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class ToyScheduler:
    """Decodes first, then prompts in chunks, under a budget of tokens."""

    def __init__(self, num_blocks: int = 64, block_size: int = 16, budget: int = 512) -> None:
        self.free, self.block_size, self.budget = list(range(num_blocks - 1, 0, -1)), block_size, budget
        self.running: dict[str, Request] = {}
        self.done: dict[str, Request] = {}
        self.finished: list[str] = []
        self.errors: dict[str, str] = {}
        self.prompt_logprobs: dict[str, list[Any]] = {}
        self.num_mixed_steps = 0

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 8, **sampling: Any) -> None:
        params = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **sampling})
        self.running[request_id] = Request(list(prompt), len(prompt), params)

    def schedule(self) -> SchedulerOutput:
        counts: dict[str, int] = {}
        left = self.budget
        for name, request in sorted(self.running.items(), key=lambda item: not item[1].output):
            count = min(len(request.token_ids) - request.num_computed, left)
            if count > 0:
                counts[name], left = count, left - count
        self.num_mixed_steps += len({count > 1 for count in counts.values()}) == 2
        new = [self._new(name, counts[name]) for name in counts if self.running[name].num_told is None]
        known = [name for name in counts if name not in {each.request_id for each in new}]
        cached = CachedRequestData(
            request_ids=known,
            new_token_ids=[self.running[name].token_ids[self.running[name].num_told :] for name in known],
            new_block_ids=[self._more_blocks(name, counts[name]) for name in known],
            num_computed_tokens=[self.running[name].num_computed for name in known],
        )
        finished, self.finished = self.finished, []
        for name, count in counts.items():
            request = self.running[name]
            request.num_computed, request.num_told = request.num_computed + count, len(request.token_ids)
        return SchedulerOutput(new=new, cached=cached, num_scheduled_tokens=counts, finished_request_ids=finished)

    def commit(self, output: ModelRunnerOutput) -> None:
        for name, entries in output.prompt_logprobs.items():
            self.prompt_logprobs.setdefault(name, []).extend(entries)
        for name, error in output.errors.items():
            self.errors[name] = error
            self._finish(name)
        for name, tokens in zip(output.request_ids, output.sampled_token_ids, strict=True):
            request = self.running[name]
            request.token_ids.extend(tokens)
            if len(request.output) >= (request.sampling.max_tokens or 0):
                self._finish(name)

    def preempt(self, name: str) -> None:
        """Take its blocks back; it will be computed again."""
        request = self.running[name]
        self.finished.append(name)
        self.free.extend(reversed(request.block_ids))
        request.block_ids, request.num_computed, request.num_told = [], 0, None

    def run(self, runner: ModelRunner) -> dict[str, list[int]]:
        """All that was added, to the end; output tokens by request."""
        while self.running:
            runner.execute_model(self.schedule())
            self.commit(runner.sample_tokens(None))
        runner.execute_model(self.schedule())  # no tokens: the runner forgets the last ones
        return {name: request.output for name, request in self.done.items()}

    def _new(self, name: str, count: int) -> NewRequestData:
        request = self.running[name]
        return NewRequestData(
            request_id=name,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            block_ids=self._more_blocks(name, count),
            num_computed_tokens=request.num_computed,
            sampling=request.sampling,
        )

    def _more_blocks(self, name: str, count: int) -> list[int]:
        request = self.running[name]
        missing = -(-(request.num_computed + count) // self.block_size) - len(request.block_ids)
        blocks = [self.free.pop() for _ in range(missing)]
        request.block_ids.extend(blocks)
        return blocks

    def _finish(self, name: str) -> None:
        self.done[name] = self.running.pop(name)
        self.finished.append(name)
        self.free.extend(reversed(self.done[name].block_ids))


@pytest.fixture
def toy_scheduler() -> type[ToyScheduler]:
    """The scheduler's class."""
    return ToyScheduler
