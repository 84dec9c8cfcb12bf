"""Step calls without a task for each: what is told to the driver, and when nothing is any longer."""

from __future__ import annotations

import pytest

from aexec.actor import Actor, ActorSystem, handles
from aexec.engine.calls import StepEnded, StepFailed, StepLaunched
from aexec.engine.replies import StepReplies
from aexec.errors import ExecutorClosed
from aexec.messages.batch import ModelRunnerOutput
from aexec.messages.step import ExecuteModel, ForwardLaunched, SampleTokens, StepId, StepResult

pytestmark = pytest.mark.anyio

STEP = StepId(7)
OUTPUT = ModelRunnerOutput()


class Driver(Actor):
    """Keeps what it is told."""

    def __init__(self, executor):
        self.replies, self.told = StepReplies(executor, self), []
        executor.driver = self

    @handles(StepLaunched)
    def launched(self, message: StepLaunched) -> None:
        self.told.append(message)

    @handles(StepEnded)
    def ended(self, message: StepEnded) -> None:
        self.told.append(message)

    @handles(StepFailed)
    def failed(self, message: StepFailed) -> None:
        self.told.append(message)


class Asked:
    """An executor that is asked in a task."""

    async def execute_model(self, step):
        return ForwardLaunched(step.step)

    async def sample_tokens(self, step, grammar=None):
        return StepResult(step, OUTPUT)


class Posted(Asked):
    """An executor that takes calls at once, while its short way is open."""

    def __init__(self):
        self.is_open, self.posted, self.left = True, [], []

    def post(self, message, reply):
        if self.is_open:
            self.posted.append((message, reply))
            reply.on_cancel(lambda: self.left.append(message))
        return self.is_open


async def told_by(executor, use):
    """What the driver was told while ``use`` ran with its replies."""
    async with ActorSystem() as system:
        await system.spawn(Driver, executor)
        driver = executor.driver
        use(driver.replies)
        for _ in range(20):
            await system.sleep(0.0)
        return driver.told, repr(driver.replies)


def both(replies):
    replies.launch(ExecuteModel(STEP, None, 1))
    replies.sample(SampleTokens(STEP))


@pytest.mark.parametrize("closed", [False, True])
async def test_an_executor_without_a_short_way_is_asked(closed):
    """It has no ``post``, or one that does not take the call: the driver is told all the same."""
    executor = Posted() if closed else Asked()
    executor.is_open = False
    told, _ = await told_by(executor, both)
    assert told == [StepLaunched(STEP, ForwardLaunched(STEP)), StepEnded(STEP, OUTPUT)]


async def test_what_is_posted_is_told_when_it_is_answered():
    """Launch and sampling go out in the turn of the driver, and each answer is one message."""
    executor = Posted()

    def use(replies):
        both(replies)
        assert [type(message) for message, _ in executor.posted] == [ExecuteModel, SampleTokens]
        assert repr(replies) == "<StepReplies: 2 awaited>"
        executor.posted[0][1].resolve(ForwardLaunched(STEP))
        executor.posted[1][1].resolve(StepResult(STEP, OUTPUT))

    told, left = await told_by(executor, use)
    assert told == [StepLaunched(STEP, ForwardLaunched(STEP)), StepEnded(STEP, OUTPUT)]
    assert left == "<StepReplies: 0 awaited>"


async def test_a_refusal_fails_the_step():
    """An error of either call is told as that of its step."""
    executor, error = Posted(), ExecutorClosed("the executor is closed")

    def use(replies):
        both(replies)
        executor.posted[1][1].fail(error)

    told, _ = await told_by(executor, use)
    assert told == [StepFailed(STEP, error)]


async def test_a_driver_that_ends_waits_for_nothing():
    """The executor hears that nobody waits, and what it says after that is dropped."""
    executor = Posted()

    def use(replies):
        both(replies)
        replies.leave()
        executor.posted[0][1].resolve(ForwardLaunched(STEP))

    told, _ = await told_by(executor, use)
    assert told == []
    assert sorted(type(message).__name__ for message in executor.left) == ["ExecuteModel", "SampleTokens"]
