from __future__ import annotations

import asyncio

import pytest

from aexec.actor import ActorSystem
from aexec.errors import CallTimeout, StepStateError
from aexec.messages.step import ExecuteModel, ForwardLaunched, SampleTokens, StepResult
from aexec.model.actor import ModelRunnerActor, StepStatistics

pytestmark = pytest.mark.anyio


class HandCompute:
    """A compute thread that works when the test says so."""

    def __init__(self):
        self.jobs = []

    def submit(self, phase, call, done, step=None):
        self.jobs.append((phase, step, call, done))

    def work(self, number=None):
        """Do so many jobs, by default all."""
        while self.jobs and number != 0:
            _, _, call, done = self.jobs.pop(0)
            try:
                value = call()
            except Exception as error:
                done(None, error)
            else:
                done(value, None)
            number = None if number is None else number - 1

    @property
    def queue(self):
        return [(phase, step) for phase, step, _, _ in self.jobs]


class Runner:
    samples = True

    def __init__(self):
        self.calls = []
        self.fails = {}

    def execute_model(self, step):
        self.calls.append(("execute", step.step))
        if step.step in self.fails:
            raise self.fails[step.step]
        return f"whole {step.step}"

    def sample_tokens(self, step, grammar):
        self.calls.append(("sample", step, grammar))
        return f"tokens {step}"


@pytest.fixture
def compute():
    return HandCompute()


@pytest.fixture
def runner():
    return Runner()


@pytest.fixture
async def ref(compute, runner):
    async with ActorSystem(timeout=5.0) as system:
        yield await system.spawn(ModelRunnerActor, runner, compute)


async def settle():
    """Let the actor take in what was sent."""
    for _ in range(10):
        await asyncio.sleep(0)


async def launch(ref, *steps):
    for step in steps:
        assert await ref.ask(ExecuteModel(step)) == ForwardLaunched(step)


async def ask(ref, message, **options):
    """Send it, and let the actor take it in."""
    task = asyncio.ensure_future(ref.ask(message, **options))
    await settle()
    return task


async def test_a_launch_is_answered_while_the_forward_pass_is_queued(ref, compute, runner):
    """The reply says queued, not done."""
    await launch(ref, 1)
    assert compute.queue == [("execute_model", 1)]
    assert runner.calls == []


async def test_sampling_follows_the_forward_pass(ref, compute, runner):
    """The result comes when both are done."""
    await launch(ref, 1)
    sampling = await ask(ref, SampleTokens(1))
    assert compute.queue == [("execute_model", 1), ("sample_tokens", 1)]
    assert not sampling.done()
    compute.work()
    assert await sampling == StepResult(1, "tokens 1")
    assert runner.calls == [("execute", 1), ("sample", 1, None)]


async def test_a_step_without_tokens_runs_whole(ref, compute):
    """Its one reply is its result."""
    whole = await ask(ref, ExecuteModel(1, num_tokens=0))
    assert not whole.done()
    compute.work()
    assert await whole == StepResult(1, "whole 1")


async def test_every_step_of_a_runner_that_does_not_sample_is_whole(ref, compute, runner):
    """As of a pooling model."""
    runner.samples = False
    whole = await ask(ref, ExecuteModel(1, num_tokens=8))
    compute.work()
    assert await whole == StepResult(1, "whole 1")


async def test_several_steps_are_in_flight(ref, compute, runner):
    """The compute thread gets them in the order they came."""
    await launch(ref, 1, 2)
    first = await ask(ref, SampleTokens(1))
    await launch(ref, 3)
    second = await ask(ref, SampleTokens(2))
    assert compute.queue == [
        ("execute_model", 1),
        ("execute_model", 2),
        ("sample_tokens", 1),
        ("execute_model", 3),
        ("sample_tokens", 2),
    ]
    compute.work()
    assert (await first).step == 1
    assert (await second).step == 2


async def test_an_older_step_is_sampled_first(ref, compute):
    """A sampling that was asked for too early waits, so that results come in step order."""
    await launch(ref, 1, 2, 3)
    third = await ask(ref, SampleTokens(3))
    second = await ask(ref, SampleTokens(2))
    compute.work()
    assert not third.done()
    assert not second.done()
    first = await ask(ref, SampleTokens(1))
    assert compute.queue == [("sample_tokens", 1), ("sample_tokens", 2), ("sample_tokens", 3)]
    compute.work()
    assert [(await task).step for task in (first, second, third)] == [1, 2, 3]


@pytest.mark.parametrize("message", [ExecuteModel(2), ExecuteModel(1), SampleTokens(5)])
async def test_a_message_in_the_wrong_state_is_refused(ref, message):
    """Duplicate, decreasing, unknown: each names its step and those that wait."""
    await launch(ref, 2)
    with pytest.raises(StepStateError, match=r"\(pending: 2\)") as caught:
        await ref.ask(message)
    assert caught.value.step == message.step


async def test_a_step_is_sampled_once(ref, compute):
    """The second time is refused, while the first is under way and after it."""
    await launch(ref, 1)
    sampling = await ask(ref, SampleTokens(1))
    with pytest.raises(StepStateError, match="step 1 was sampled already"):
        await ref.ask(SampleTokens(1))
    compute.work()
    await sampling
    with pytest.raises(StepStateError, match="step 1 was sampled already"):
        await ref.ask(SampleTokens(1))


@pytest.mark.parametrize("asked_before", [True, False])
async def test_a_failed_forward_pass_surfaces_at_its_sampling(ref, compute, runner, asked_before):
    """Whether it was asked for before or after; nothing is sampled, and the step is dropped."""
    runner.fails[1] = ZeroDivisionError("in the model")
    await launch(ref, 1)
    if asked_before:
        sampling = await ask(ref, SampleTokens(1))
        compute.work()
    else:
        compute.work()
        sampling = await ask(ref, SampleTokens(1))
    with pytest.raises(ZeroDivisionError):
        await sampling
    assert runner.calls == [("execute", 1)]
    with pytest.raises(StepStateError, match="step 1 was dropped: its execute_model raised ZeroDivisionError"):
        await ref.ask(SampleTokens(1))


async def test_a_failed_forward_pass_holds_up_no_younger_step(ref, compute, runner):
    """Its sampling may never be asked for."""
    runner.fails[1] = ZeroDivisionError()
    await launch(ref, 1, 2)
    sampling = await ask(ref, SampleTokens(2))
    compute.work()
    compute.work()
    assert await sampling == StepResult(2, "tokens 2")


async def test_a_failed_sampling_is_its_askers(ref, compute, runner):
    """And the step is dropped."""
    runner.sample_tokens = lambda step, grammar: 1 // 0
    await launch(ref, 1)
    sampling = await ask(ref, SampleTokens(1))
    compute.work()
    with pytest.raises(ZeroDivisionError):
        await sampling
    with pytest.raises(StepStateError, match="step 1 was dropped: its sample_tokens raised ZeroDivisionError"):
        await ref.ask(SampleTokens(1))


@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_a_waiter_that_goes_leaves_the_step_alone(ref, compute, runner, how):
    """The step is sampled all the same: the device cannot be stopped, and later steps keep their place."""
    await launch(ref, 1, 2)
    sampling = await ask(ref, SampleTokens(1), timeout=0.01 if how == "expired" else 5.0)
    if how == "cancelled":
        sampling.cancel()
    with pytest.raises((asyncio.CancelledError, CallTimeout)):
        await sampling
    compute.work()
    following = await ask(ref, SampleTokens(2))
    compute.work()
    assert await following == StepResult(2, "tokens 2")
    assert runner.calls[-2:] == [("sample", 1, None), ("sample", 2, None)]


async def test_dropped_steps_tell_why(compute, runner):
    """A new generation or a shutdown gives up all that waits."""
    actor = ModelRunnerActor(runner, compute)
    async with ActorSystem() as system:
        ref = await system.spawn(lambda: actor)
        await launch(ref, 1, 2)
        actor.drop_steps("the worker was shut down")
        for step in (1, 2):
            with pytest.raises(StepStateError, match=f"step {step} was dropped: the worker was shut down"):
                await ref.ask(SampleTokens(step))


async def test_steps_are_counted(compute, runner):
    """What is pending, what was done, what failed."""
    actor = ModelRunnerActor(runner, compute)
    runner.fails[3] = ZeroDivisionError()
    async with ActorSystem() as system:
        ref = await system.spawn(lambda: actor)
        await launch(ref, 1, 2, 3)
        first = await ask(ref, SampleTokens(1))
        compute.work()
        await first
        with pytest.raises(ZeroDivisionError):
            await ref.ask(SampleTokens(3))
        assert actor.step_statistics() == StepStatistics(pending=1, executed=3, finished=1, failed=1)
