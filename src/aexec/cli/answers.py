"""Run several prompts at once and measure each: what ``generate`` and ``demo`` have in common."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from aexec.errors import AexecError
from aexec.messages import TokenChunk
from aexec.observe import RequestFinished, get_logger, log_event

__all__ = ("Answer", "OnText", "Stream", "answer_all")


class Stream(Protocol):
    """A request's chunks; leaving it aborts the request."""

    def __aiter__(self) -> AsyncIterator[TokenChunk]:
        """Return what iterates over the chunks."""
        ...

    async def aclose(self) -> None:
        """Leave."""
        ...


OnText = Callable[[int, str, bool], None]
"""Index of the prompt, its new text, and whether the prompt has ended."""


@dataclass(slots=True)
class Answer:
    """One prompt, or one sample of it, and what became of it.

    Attributes:
        prompt: As the user gave it.
        sample: Which of several samples; None: there is one.
        text: All of the text so far.
        token_ids: All new tokens so far.
        stop_reason: The stop text or token that ended it.
        record: What was measured, once it has finished.
        error: Why it did not finish.
    """

    prompt: str
    sample: int | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    stop_reason: str | int | None = None
    record: RequestFinished | None = None
    error: AexecError | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the facts for ``--json``; a failed prompt has ``error`` in the place of the text."""
        which: dict[str, Any] = {"prompt": self.prompt}
        if self.sample is not None:
            which["sample"] = self.sample
        if self.record is None:
            return {**which, "error": type(self.error).__name__, "message": str(self.error)}
        return {
            **which,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.record.finish_reason,
            "stop_reason": self.stop_reason,
            "prompt_tokens": self.record.num_prompt_tokens,
            "completion_tokens": self.record.num_completion_tokens,
            "first_token_seconds": round(self.record.first_token_seconds, 4),
            "seconds": round(self.record.seconds, 4),
        }


async def answer_all(
    prompts: Sequence[str], start: Callable[[str], Stream], on_text: OnText, num_samples: int = 1
) -> list[Answer]:
    """Run all prompts concurrently; a prompt that fails leaves the others alone.

    Args:
        prompts: One request each.
        start: Starts a request and returns its stream.
        on_text: Told of each piece of text as it comes, and of each answer's end.
        num_samples: Answers of each prompt; they stand beside each other in what is returned.
    """
    answers = [
        Answer(prompt, None if num_samples == 1 else sample) for prompt in prompts for sample in range(num_samples)
    ]
    async with asyncio.TaskGroup() as group:
        for first in range(0, len(answers), num_samples):
            samples = answers[first : first + num_samples]
            group.create_task(_answer(first, samples, start, on_text), name=f"prompt-{first // num_samples}")
    return answers


async def _answer(first: int, samples: list[Answer], start: Callable[[str], Stream], on_text: OnText) -> None:
    try:
        await _follow(first, samples, start(samples[0].prompt), on_text)
    except AexecError as error:
        for index, answer in enumerate(samples, first):
            if answer.record is None:
                answer.error = error
                on_text(index, "", True)


async def _follow(first: int, samples: list[Answer], stream: Stream, on_text: OnText) -> None:
    begun = time.perf_counter()
    seconds: dict[int, float] = {}  # until the first token of each sample
    async with aclosing(stream) as chunks:  # leaving it aborts the request
        async for chunk in chunks:
            answer = samples[chunk.index]
            seconds.setdefault(chunk.index, time.perf_counter() - begun)
            answer.text += chunk.text
            answer.token_ids += chunk.token_ids
            on_text(first + chunk.index, chunk.text, False)
            if chunk.finish_reason is not None:
                answer.stop_reason = chunk.stop_reason
                answer.record = _record(chunk, seconds[chunk.index], time.perf_counter() - begun)
                log_event(get_logger("aexec.cli"), answer.record)
                on_text(first + chunk.index, "", True)


def _record(last: TokenChunk, first: float, seconds: float) -> RequestFinished:
    return RequestFinished(
        request_id=last.request_id,
        num_prompt_tokens=last.num_prompt_tokens,
        num_completion_tokens=last.num_completion_tokens,
        finish_reason=str(last.finish_reason),
        first_token_seconds=first,
        seconds=seconds,
    )
