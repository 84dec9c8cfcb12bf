"""Kill a worker process while eight streams are read: each goes on with the very token that was due.

Run it: ``python examples/unnoticed_crash.py``
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal

from aexec import AsyncLLM, Restart, SamplingParams
from aexec.engine.events import EngineDown, EngineRecovered

logging.getLogger("aexec").setLevel(logging.CRITICAL + 1)  # a death is logged; events tell of it here

PROMPTS = [f"Tell me about the number {number}" for number in range(8)]
PARAMS = SamplingParams(max_tokens=60, seed=7)


async def read(llm: AsyncLLM, prompt: str, halfway: asyncio.Event) -> str:
    text = ""
    async for chunk in llm.generate(prompt, PARAMS):
        text += chunk.text
        if chunk.num_completion_tokens >= 30:
            halfway.set()
    return text


async def kill_one(llm: AsyncLLM, halfway: asyncio.Event) -> None:
    events = llm.events()
    await halfway.wait()
    os.kill(llm.executor.ranks[1].pid, signal.SIGKILL)
    async for event in events:
        if isinstance(event, EngineDown):
            print("down: rank 1", event.reason.partition(") ")[2].partition(" during")[0])
        elif isinstance(event, EngineRecovered):
            print("up again: generation", event.generation)
            return


async def main() -> None:
    restart = Restart(backoff=0.05)
    model = "dummy:forward_seconds=0.002"
    async with AsyncLLM(model, tensor_parallel_size=2, on_failure=restart) as llm:
        undisturbed = await asyncio.gather(*(llm.complete(prompt, PARAMS) for prompt in PROMPTS))
        halfway = asyncio.Event()
        killing = asyncio.create_task(kill_one(llm, halfway))
        texts = await asyncio.gather(*(read(llm, prompt, halfway) for prompt in PROMPTS))
        await killing
    print("the same text in all streams:", texts == [one.text for one in undisturbed])


asyncio.run(main())
