from __future__ import annotations

import json
from collections.abc import AsyncGenerator

import anyio
import pytest

from aexec.cli.answers import Answer, answer_all
from aexec.errors import InvalidRequest
from aexec.messages import TokenChunk

pytestmark = pytest.mark.anyio


class Engine:
    """Writes the words of a prompt one by one, all streams in step with each other."""

    def __init__(self, streams: int) -> None:
        self.barrier_size, self.arrived, self.open = streams, 0, anyio.Event()
        self.closed: list[str] = []

    async def start(self, prompt: str) -> AsyncGenerator[TokenChunk, None]:
        """Stream ``prompt``; an empty one is refused."""
        if not prompt:
            raise InvalidRequest("the prompt is empty")
        self.arrived += 1
        if self.arrived == self.barrier_size:
            self.open.set()
        await self.open.wait()
        try:
            words = prompt.split()
            for count, word in enumerate(words, 1):
                yield TokenChunk(
                    request_id=prompt,
                    text=word,
                    token_ids=(count,),
                    finish_reason="stop" if count == len(words) else None,
                    stop_reason="." if count == len(words) else None,
                    num_prompt_tokens=3,
                    num_completion_tokens=count,
                )
        finally:
            self.closed.append(prompt)


async def test_all_prompts_run_at_once() -> None:
    """No prompt waits for another: here none could go on before all have begun."""
    engine = Engine(3)
    with anyio.fail_after(20.0):
        answers = await answer_all(["a b", "c", "d e"], engine.start, lambda *_: None)
    assert [answer.text for answer in answers] == ["ab", "c", "de"]
    assert sorted(engine.closed) == ["a b", "c", "d e"]


async def test_a_prompt_that_fails_leaves_the_others_alone() -> None:
    """Its error is kept beside its prompt, and the rest finish."""
    answers = await answer_all(["a b", ""], Engine(1).start, lambda *_: None)
    assert [answer.text for answer in answers] == ["ab", ""]
    assert isinstance(answers[1].error, InvalidRequest)
    assert answers[0].error is None


async def test_text_is_told_as_it_comes_and_so_is_the_end() -> None:
    """The listener hears each piece, and of the end of a prompt even when it failed."""
    heard: list[tuple[int, str, bool]] = []
    await answer_all(["a b", ""], Engine(1).start, lambda *told: heard.append(told))
    assert [told for told in heard if told[0] == 0] == [(0, "a", False), (0, "b", False), (0, "", True)]
    assert [told for told in heard if told[0] == 1] == [(1, "", True)]


async def test_the_json_of_a_completion_has_what_a_script_needs() -> None:
    """Text, token ids, why it ended, and the counts, under stable names."""
    (answer,) = await answer_all(["a b"], Engine(1).start, lambda *_: None)
    facts = json.loads(json.dumps(answer.as_json()))
    assert facts.pop("seconds") >= facts.pop("first_token_seconds") >= 0.0
    assert facts == {
        "prompt": "a b",
        "text": "ab",
        "token_ids": [1, 2],
        "finish_reason": "stop",
        "stop_reason": ".",
        "prompt_tokens": 3,
        "completion_tokens": 2,
    }


def test_the_json_of_a_failed_prompt_has_the_error() -> None:
    """A failed prompt keeps its line, with the error's class and text."""
    failed = Answer("x", error=InvalidRequest("the prompt is empty"))
    assert failed.as_json() == {"prompt": "x", "error": "InvalidRequest", "message": "the prompt is empty"}
