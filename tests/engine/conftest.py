"""An executor without workers: a dummy model runner behind gates that a test may hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import asynccontextmanager

import anyio
import pytest

from aexec.config import CacheConfig, ModelConfig
from aexec.engine.assembly import ModelText
from aexec.engine.bytes_text import ByteTokenizer
from aexec.engine.llm import AsyncLLM
from aexec.executor.lifecycle import ExecutorState
from aexec.messages.batch import ModelRunnerOutput, SchedulerOutput
from aexec.messages.lifecycle import HealthReport, RankHealth
from aexec.messages.step import ExecuteModel, ForwardLaunched, StepResult
from aexec.model.dummy.runner import DummyRunner
from aexec.observe.hub import EventHub


class FakeExecutor:
    """Runs steps at once, on the loop.

    ``hold`` makes the next steps wait for ``release``; ``fail_execute`` and
    ``fail_sample`` are raised by the next call; ``spoil`` changes what it answers.
    """

    world_size, output_rank, generation = 1, 0, 1
    state = ExecutorState.READY

    def __init__(self, model="dummy", **cache):
        self.runner = DummyRunner(ModelConfig(model=model), CacheConfig(**cache))
        self.runner.load_model()
        self.runner.initialize_cache(self.runner.determine_available_memory())
        self.steps: list[ExecuteModel] = []
        self.fail_execute: Exception | None = None
        self.fail_sample: Exception | None = None
        self.spoil = lambda output: output
        self.is_closed = False
        self.news = EventHub()
        self.tell_failure = []
        self._line = deque()
        self._gate = anyio.Event()
        self._gate.set()
        self.held = anyio.Event()

    def hold(self):
        self._gate, self.held = anyio.Event(), anyio.Event()

    def release(self):
        self._gate.set()

    async def collective_rpc(self, method, args=(), kwargs=None, timeout=None, ranks=None):
        assert method == "model_info"
        return [self.runner.info()]

    async def check_health(self, timeout=1.0):
        step = self.steps[-1].step if self.steps else None
        ranks = [RankHealth(rank=0, state="alive", phase="idle", step=step, age=0.0)]
        return HealthReport(generation=1, ranks=ranks)

    async def execute_model(self, step):
        self.steps.append(step)
        if self.fail_execute is not None:
            raise self.fail_execute
        if self._line:  # behind a sampling that is held
            self._line.append(step.payload)
        else:
            self.runner.execute_model(step.payload)
        if step.num_tokens == 0:
            return StepResult(step.step, ModelRunnerOutput())
        return ForwardLaunched(step.step)

    async def sample_tokens(self, step_id, grammar=None):
        self.held.set()
        turn = object()
        self._line.append(turn)
        await self._gate.wait()
        while self._line and (first := self._line.popleft()) is not turn:
            if isinstance(first, SchedulerOutput):  # and no turn that was given up
                self.runner.execute_model(first)
        if self.fail_sample is not None:
            raise self.fail_sample
        return StepResult(step_id, self.spoil(self.runner.sample_tokens(grammar)))

    def events(self):
        return self.news.listen()

    def add_failure_callback(self, callback):
        self.tell_failure.append(callback)

    async def close(self):
        self.is_closed = True


class FakeAssembly:
    """Bytes for text, no workers."""

    def __init__(self):
        self.text = ModelText(ByteTokenizer(), (256,))
        self.configs = []
        self.opened = []

    def load_text(self, model, progress):
        progress("text", 1, 1)
        return self.text

    async def open_executor(self, config, progress):
        progress("workers", 1, 1)
        self.configs.append(config)
        self.opened.append(FakeExecutor())
        return self.opened[-1]

    def worker_kwargs(self, model, cache) -> Mapping[str, object]:
        return {"model": model, "cache": cache}


class Engine(AsyncLLM):
    """The engine under test; ``assembly`` is replaced by each test that looks at it."""

    assembly = FakeAssembly()


@pytest.fixture
def fake_executor():
    return FakeExecutor


@pytest.fixture
def engine_class():
    return type("Engine", (Engine,), {"assembly": FakeAssembly()})


@pytest.fixture
def engine(engine_class):
    """What opens an engine on a fake executor; yields both."""

    @asynccontextmanager
    async def opened(model="dummy", **settings):
        cache = {name: settings.pop(name) for name in ("num_blocks", "block_size") if name in settings}
        settings.setdefault("async_scheduling", False)  # steps that a test holds are then one at a time
        executor = FakeExecutor(model, **cache)
        async with engine_class(model, executor=executor, **settings) as llm:
            yield llm, executor

    return opened
