"""One rank of a random program; run as a script by each process, it prints what must be equal on all ranks."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys

from aexec import AsyncLLM, SamplingParams


async def one(llm, dice, number):
    """A request: run, left, or called off, a little later than on other ranks."""
    await asyncio.sleep(dice.choice([0.0, 0.0, 0.002, 0.01]))
    prompt, name = [60 + (number * 5 + place) % 9 for place in range(1 + 3 * number)], f"r{number}"
    if number % 4 == 3:
        running = asyncio.create_task(llm.complete(prompt, SamplingParams(max_tokens=90, seed=1), request_id=name))
        await asyncio.sleep(dice.choice([0.0, 0.005]))
        running.cancel()
        return None
    tokens = []
    async for chunk in llm.generate(prompt, SamplingParams(max_tokens=40, temperature=0.0), request_id=name):
        tokens += chunk.token_ids
        if number % 4 == 1 and len(tokens) > 6:
            break
    return tokens[:7] if number % 4 == 1 else tokens


async def main():
    """Requests, a pause and calls of the workers, all at once."""
    dice = random.Random(os.environ["RANK"])
    room = {"num_blocks": 50, "block_size": 4, "max_num_batched_tokens": 16}
    async with AsyncLLM("dummy", executor="external_launcher", tensor_parallel_size=2, **room) as llm:

        async def pause():
            await asyncio.sleep(dice.choice([0.0, 0.01]))
            await llm.pause()
            infos = await llm.collective_rpc("model_info")
            await llm.resume()
            return [info.num_blocks for info in infos]

        said = await asyncio.gather(*(one(llm, dice, number) for number in range(12)), pause())
        said.append((await llm.complete([65], SamplingParams(max_tokens=5))).token_ids)  # with a seed that is drawn
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    asyncio.run(main())
