"""Serve a model with Ray Serve: each replica holds an engine, and streams the text that it writes.

In an environment with ``pip install 'aexec[ray]' 'ray[serve]'``, where this file is::

    $ serve run ray_serve:app model=smollm2
    $ curl -N 'localhost:8000/?prompt=The+capital+of+France+is'

A replica is a Ray actor, and so is each of its workers: they get a placement group of their
own in the same cluster. When a client goes away its request is aborted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

from aexec import AexecError, AsyncLLM, ExecutorConfig, ParallelConfig, Restart, SamplingParams

WORKERS = ExecutorConfig(backend="ray", parallel=ParallelConfig(tensor_parallel_size=2), on_failure=Restart())


class Model:
    """What a replica is; Serve awaits its ``__init__`` and its ``__del__``."""

    async def __init__(self, model: str, executor: str | ExecutorConfig = WORKERS) -> None:
        self.llm = AsyncLLM(model, executor=executor)
        await self.llm.open()
        self.failure: AexecError | None = None
        self.llm.executor.add_failure_callback(self.fail)

    def fail(self, failure: AexecError) -> None:
        self.failure = failure

    async def __call__(self, request: Request) -> StreamingResponse:
        prompt = request.query_params.get("prompt", "Hello")
        return StreamingResponse(self.text(prompt), media_type="text/plain")

    async def text(self, prompt: str) -> AsyncIterator[str]:
        async with self.llm.generate(prompt, SamplingParams(max_tokens=64), timeout=60.0) as chunks:
            async for chunk in chunks:
                yield chunk.text

    def check_health(self) -> None:
        """Serve asks this every ten seconds, and replaces a replica that raises."""
        if self.failure is not None:
            raise self.failure

    async def __del__(self) -> None:
        await self.llm.aclose()


def app(arguments: dict[str, Any]) -> serve.Application:
    """What ``serve run`` deploys."""
    deployment = serve.deployment(Model, max_ongoing_requests=256, ray_actor_options={"num_cpus": 0})
    return deployment.bind(arguments.get("model", "dummy"))
