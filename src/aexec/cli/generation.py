"""What ``aexec generate`` and ``aexec demo`` do: open an engine, run prompts, show what came."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import aexec
from aexec import environ
from aexec.cli.answers import Answer, OnText, Stream, answer_all
from aexec.cli.failures import exit_code, explain, worst
from aexec.cli.launched import Place, place_of
from aexec.cli.options import EngineOptions, SamplingOptions
from aexec.cli.show import InOrder, loading, places, summary, table
from aexec.executor.ray.cluster import LOCAL, where

__all__ = ("demonstrate", "generate")

DEMO_PROMPTS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Write one sentence about the sea.",
)


@asynccontextmanager
async def opened(
    options: EngineOptions,
    *,
    quiet: bool = False,
    place: Place = Place(),  # noqa: B008 - frozen
) -> AsyncGenerator[aexec.AsyncLLM]:
    """Open the engine that ``options`` describe, with a progress bar while it loads.

    Args:
        options: See there.
        quiet: Do not say where Ray has put its ranks.
        place: Which of several processes this is that run the same command; the first one shows the bar.
    """
    config = options.executor_config
    environ.set_default("RAY_SCHEDULER_EVENTS", "0")  # what Ray would say of a wait is in our own report of it
    async with AsyncExitStack() as stack:
        with loading(options.model, quiet=place.is_quiet) as progress:
            llm = aexec.AsyncLLM(
                options.model,
                executor=config,
                tensor_parallel_size=options.tensor_parallel_size,
                pipeline_parallel_size=options.pipeline_parallel_size,
                dtype=options.dtype,
                device=options.device,
                max_model_len=options.max_model_len,
                num_blocks=options.num_blocks,
                max_num_batched_tokens=options.max_num_batched_tokens,
                prefix_caching=options.prefix_caching,
                kv_connector=options.kv_connector,
                async_scheduling=options.async_scheduling,
                progress=progress,
            )
            await stack.enter_async_context(llm)
        if not quiet and llm.executor.describe()["backend"].value == "ray":
            is_started = where(config, environ.inherited()) == LOCAL
            print(places(llm.executor, is_started=is_started), file=sys.stderr)
        yield llm


def starter(llm: aexec.AsyncLLM, sampling: SamplingOptions, *, chat: bool) -> Callable[[str], Stream]:
    """Return what starts a request for a prompt."""
    params = sampling.params()

    def start(prompt: str) -> Stream:
        return llm.generate(
            llm.chat_prompt([{"role": "user", "content": prompt}]) if chat else prompt,
            params,
            priority=sampling.priority,
            timeout=sampling.timeout,
            cache_salt=sampling.cache_salt,
        )

    return start


async def generate(
    engine: EngineOptions, sampling: SamplingOptions, prompts: Sequence[str], *, chat: bool, as_json: bool
) -> int:
    """Run ``prompts`` at once; text or JSON goes to standard output, all else to standard error.

    Where a launcher has started several processes with this command, rank 0 prints.

    Returns:
        The exit code: of the worst failure, when one prompt or several failed.
    """
    place = place_of(engine)
    if place.is_quiet:
        return await _join_in(place, engine, sampling, prompts, chat=chat)
    sampling.params()  # what cannot be meant is refused before a model is loaded
    each_answer = [prompt for prompt in prompts for _ in range(sampling.n)]
    on_text = _untold if as_json else InOrder(each_answer, sys.stdout)
    answers, seconds = await _timed(engine, sampling, prompts, on_text, chat=chat)
    if as_json:
        for answer in answers:
            print(json.dumps(answer.as_json(), ensure_ascii=sys.stdout.encoding != "utf-8"))
    _report_errors(answers, sampling.n)
    if not as_json and any(answer.record for answer in answers):
        print(f"\n{summary(answers, seconds)}", file=sys.stderr)
    return worst(answer.error for answer in answers)


async def _join_in(
    place: Place, engine: EngineOptions, sampling: SamplingOptions, prompts: Sequence[str], *, chat: bool
) -> int:
    """Do what rank 0 does, and say nothing that it says."""
    try:
        answers, _ = await _timed(engine, sampling, prompts, _untold, chat=chat, place=place)
    except Exception as error:  # noqa: BLE001  # as `app.run` has it for rank 0
        place.complain(error)
        return exit_code(error)
    failed = {str(answer.error): answer.error for answer in answers if answer.error is not None}
    for failure in failed.values():
        place.complain(failure)
    return worst(answer.error for answer in answers)


async def demonstrate(engine: EngineOptions, max_tokens: int) -> int:
    """Ask the model three questions at once, and print its answers and the figures of each."""
    sampling = SamplingOptions(max_tokens=max_tokens)
    on_text = InOrder(DEMO_PROMPTS, sys.stdout)
    answers, seconds = await _timed(engine, sampling, DEMO_PROMPTS, on_text, chat=True)
    print()
    table(answers, seconds)
    _report_errors(answers, 1)
    return worst(answer.error for answer in answers)


async def _timed(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompts: Sequence[str],
    on_text: OnText,
    *,
    chat: bool,
    place: Place = Place(),  # noqa: B008 - frozen
) -> tuple[list[Answer], float]:
    async with opened(engine, quiet=on_text is _untold, place=place) as llm:  # JSON alone is wanted
        begun = time.perf_counter()
        answers = await answer_all(prompts, starter(llm, sampling, chat=chat), on_text, sampling.n)
        return answers, time.perf_counter() - begun


def _untold(_index: int, _text: str, _ended: bool) -> None:  # noqa: FBT001 - a callback's third fact
    """Show nothing as text comes: JSON is printed whole."""


def _report_errors(answers: Sequence[Answer], num_samples: int) -> None:
    """Print what went wrong, once for each prompt; with one prompt there is nothing to tell apart."""
    num_prompts = len(answers) // num_samples
    for number in range(num_prompts):
        samples = answers[number * num_samples : (number + 1) * num_samples]
        for error in dict.fromkeys(answer.error for answer in samples if answer.error is not None):
            explain(error, f"prompt {number + 1} of {num_prompts}: " if num_prompts > 1 else "")
