"""A random worker is killed at a random moment, again and again: no stream shows it.

A few trials always, the number that the requirements name with ``--hypothesis-profile=nightly``
(``nox -s nightly``); ``RECOVERY_TRIALS`` overrides both. Each line of the report says how long
the streams stood still: the longest time after the kill without a token of any of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings

from aexec import AsyncLLM, Restart, SamplingParams
from aexec.engine.events import EngineDown, EngineRecovered
from aexec.executor.lifecycle import ExecutorState
from aexec.messages.structured import StructuredOutput
from aexec.testing.processes import descendants

IS_NIGHTLY = settings.get_current_profile_name() == "nightly"
ENDLESS = Restart(max_restarts=10_000, within=1.0, backoff=0.0)

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_files_are_left")]


def num_trials(usual: int, nightly: int) -> int:
    """How often to try."""
    return int(os.environ.get("RECOVERY_TRIALS", nightly if IS_NIGHTLY else usual))


@dataclass
class Reader:
    """One stream, what each of its samples says, and when its chunks came."""

    tokens: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    texts: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    ends: dict[int, tuple[object, object]] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    async def read(self, stream):
        async for chunk in stream:
            self.times.append(time.monotonic())
            self.tokens[chunk.index] += chunk.token_ids
            self.texts[chunk.index] += chunk.text
            told = [*(chunk.prompt_logprobs or ()), *(chunk.logprobs or ())]
            self.logprobs += [each.logprob for each in told if each is not None]
            if chunk.finish_reason is not None:
                self.ends[chunk.index] = (chunk.finish_reason, chunk.stop_reason)
        return self

    def __len__(self):
        """Tokens so far."""
        return sum(map(len, self.tokens.values()))

    def says_what(self, other):
        """The very tokens; log-probabilities to what another shape of the same sums leaves of them."""
        said = [(each.tokens, each.texts, each.ends) for each in (self, other)]
        return said[0] == said[1] and self.logprobs == pytest.approx(other.logprobs, abs=1e-3)


@dataclass
class Trials:
    """Kills workers of one engine while it answers the same requests."""

    llm: AsyncLLM
    requests: list[tuple[list[int] | str, SamplingParams]]
    seed: int = field(default_factory=lambda: random.SystemRandom().getrandbits(32))
    undisturbed: list[Reader] = field(default_factory=list)
    seconds: float = 0.0
    standstills: list[float] = field(default_factory=list)
    outages: list[float] = field(default_factory=list)
    num_steps_lost: int = 0

    async def answer(self, readers=None):
        readers = readers or [Reader() for _ in self.requests]
        streams = [self.llm.generate(prompt, params) for prompt, params in self.requests]
        return await asyncio.gather(*(reader.read(stream) for reader, stream in zip(readers, streams, strict=True)))

    async def run(self, number, *, twice=0.0):
        """``twice``: the share of trials in which a second worker is killed while or soon after they are rebuilt."""
        chance, began = random.Random(self.seed), time.monotonic()
        self.undisturbed = await self.answer()
        self.seconds = time.monotonic() - began
        for trial in range(number):
            where = f"trial {trial} of {number} with seed {self.seed}"
            await self._try(chance, where, again=chance.random() < twice)

    async def _try(self, chance, where, *, again):
        events = self.llm.events()
        readers = [Reader() for _ in self.requests]
        answers = asyncio.create_task(self.answer(readers))
        most = sum(map(len, self.undisturbed))
        enough = chance.random() * 0.9 * most  # by tokens, as the machine is not always as busy
        while sum(map(len, readers)) < enough:  # noqa: ASYNC110 - no stream tells of another one
            await asyncio.sleep(0.0005)
        await asyncio.sleep(chance.random() * self.seconds / 60)  # anywhere within a step or two
        assert not answers.done(), where
        killed_at = time.monotonic()
        os.kill(chance.choice(self.llm.executor.ranks).pid, signal.SIGKILL)
        down = await anext(events)
        assert isinstance(down, EngineDown), where
        if again:
            await asyncio.sleep(chance.random() * 0.3)
            await self._kill_any(chance)
        await answers
        for reader, undisturbed in zip(readers, self.undisturbed, strict=True):
            assert reader.says_what(undisturbed), f"{where}: {reader} instead of {undisturbed}"
        recovered = await anext(events)
        assert isinstance(recovered, EngineRecovered), where
        assert self.llm.executor.state is ExecutorState.READY, where
        self.num_steps_lost += len(down.lost_steps)
        if not again:
            self.outages.append(recovered.seconds)
            times = sorted(at for reader in readers for at in reader.times if at > killed_at)
            self.standstills.append(max(b - a for a, b in itertools.pairwise([killed_at, *times])))

    async def _kill_any(self, chance):
        """Whatever process there is now: a worker, or the fork server that makes the next ones."""
        pids = await asyncio.to_thread(descendants)
        if pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(pids), signal.SIGKILL)

    def __str__(self) -> str:
        still, down = self.standstills, self.outages
        return (
            f"{len(still)} crashes, {self.num_steps_lost} steps lost, undisturbed {self.seconds:.2f} s; streams stood still "
            f"for {statistics.median(still):.2f} s (median), {max(still):.2f} s (most), of which without workers "
            f"{statistics.median(down):.2f} s and {max(down):.2f} s"
        )


def mixed(number, max_tokens):
    """Greedy and seeded, with log-probabilities, minima, stop ids, several samples, and a grammar."""
    kinds = [
        {"temperature": 0.0},
        {"seed": 7},
        {"seed": 8, "logprobs": 2},
        {"temperature": 0.0, "min_tokens": 20, "prompt_logprobs": 1},
        {"seed": 9, "stop_token_ids": (77, 78)},
        {"seed": 10, "n": 2},
        {"seed": 11, "structured": StructuredOutput(regex="[a-z]{8}( [0-9]{1,4}){3}, [a-z ]+")},
    ]
    return [
        SamplingParams(max_tokens=max_tokens, ignore_eos=place % 2 == 0, **kinds[place % 7]) for place in range(number)
    ]


@pytest.fixture
def report(request) -> Callable[[object], None]:
    """Writes a line to the terminal, whatever pytest captures."""
    plugins = request.config.pluginmanager

    def write(line: object) -> None:
        with plugins.get_plugin("capturemanager").global_and_fixture_disabled():
            plugins.get_plugin("terminalreporter").write_line(f"\n{line}")

    return write


@pytest.mark.timeout(600)
async def test_a_killed_worker_of_two_changes_no_stream(report):
    """200 trials by night: 16 streams over the dummy model, two tensor-parallel ranks."""
    requests = [([65 + place] * (5 * place + 1), params) for place, params in enumerate(mixed(16, 60))]
    async with AsyncLLM(
        "dummy:forward_seconds=0.003",
        executor="mp",
        tensor_parallel_size=2,
        on_failure=ENDLESS,
        max_num_batched_tokens=256,
    ) as llm:
        trials = Trials(llm, requests)
        await trials.run(num_trials(4, 200), twice=0.1)
    report(f"dummy, mp TP 2, 16 streams: {trials}")
    assert statistics.median(trials.standstills) < 10.0


@pytest.mark.timeout(600)
async def test_a_killed_stage_changes_no_word_of_smollm2(report):
    """10 trials by night: two pipeline stages of SmolLM2, on the real model runner."""
    prompts = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "The three primary colours are"]
    requests = [(prompt, params) for prompt, params in zip(prompts, mixed(4, 24), strict=True)]
    async with AsyncLLM("smollm2", executor="mp", pipeline_parallel_size=2, on_failure=ENDLESS, num_blocks=64) as llm:
        trials = Trials(llm, requests)
        await trials.run(num_trials(1, 10))
    report(f"SmolLM2, mp PP 2, 4 streams: {trials}")
    assert statistics.median(trials.standstills) < 60.0
