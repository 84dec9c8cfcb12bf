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
    """One prompt and what became of it.

    Attributes:
        prompt: As the user gave it.
        text: All of the text so far.
        token_ids: All new tokens so far.
        stop_reason: The stop text or token that ended it.
        record: What was measured, once it has finished.
        error: Why it did not finish.
    """

    prompt: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    stop_reason: str | int | None = None
    record: RequestFinished | None = None
    error: AexecError | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the facts for ``--json``; a failed prompt has ``error`` in the place of the text."""
        if self.record is None:
            return {"prompt": self.prompt, "error": type(self.error).__name__, "message": str(self.error)}
        return {
            "prompt": self.prompt,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.record.finish_reason,
            "stop_reason": self.stop_reason,
            "prompt_tokens": self.record.num_prompt_tokens,
            "completion_tokens": self.record.num_completion_tokens,
            "first_token_seconds": round(self.record.first_token_seconds, 4),
            "seconds": round(self.record.seconds, 4),
        }


async def answer_all(prompts: Sequence[str], start: Callable[[str], Stream], on_text: OnText) -> list[Answer]:
    """Run all prompts concurrently; a prompt that fails leaves the others alone.

    Args:
        prompts: One request each.
        start: Starts a request and returns its stream.
        on_text: Told of each piece of text as it comes, and of each prompt's end.
    """
    answers = [Answer(prompt) for prompt in prompts]
    async with asyncio.TaskGroup() as group:
        for index, answer in enumerate(answers):
            group.create_task(_answer(index, answer, start, on_text), name=f"prompt-{index}")
    return answers


async def _answer(index: int, answer: Answer, start: Callable[[str], Stream], on_text: OnText) -> None:
    try:
        await _follow(answer, start(answer.prompt), lambda text: on_text(index, text, False))
    except AexecError as error:
        answer.error = error
    on_text(index, "", True)


async def _follow(answer: Answer, stream: Stream, on_text: Callable[[str], None]) -> None:
    begun = time.perf_counter()
    first = 0.0
    async with aclosing(stream) as chunks:  # leaving it aborts the request
        async for chunk in chunks:
            first = first or time.perf_counter() - begun
            answer.text += chunk.text
            answer.token_ids += chunk.token_ids
            on_text(chunk.text)
            if chunk.finish_reason is not None:
                answer.stop_reason = chunk.stop_reason
                answer.record = _record(chunk, first, time.perf_counter() - begun)
                log_event(get_logger("aexec.cli"), answer.record)


def _record(last: TokenChunk, first: float, seconds: float) -> RequestFinished:
    return RequestFinished(
        request_id=last.request_id,
        num_prompt_tokens=last.num_prompt_tokens,
        num_completion_tokens=last.num_completion_tokens,
        finish_reason=str(last.finish_reason),
        first_token_seconds=first,
        seconds=seconds,
    )
