"""The replica of the example with Ray Serve, without Serve: no session installs that.

What Serve itself makes of it (that it awaits ``__init__`` and ``__del__``, and streams the
response) was tried by hand with Ray 2.60.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aexec import SamplingParams, WorkerDied

pytestmark = pytest.mark.anyio

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve.py"


class Response:
    """Stands in for Starlette's."""

    def __init__(self, content: AsyncIterator[str], media_type: str) -> None:
        self.content, self.media_type = content, media_type


def request(**query: str) -> Any:
    """A request as far as the example looks at it."""
    return types.SimpleNamespace(query_params=query)


@pytest.fixture
def example() -> Any:
    """The example as a module, with stand-ins for what it imports."""
    serve = types.SimpleNamespace(
        deployment=lambda cls, **options: types.SimpleNamespace(bind=lambda *a: (cls, a, options))
    )
    stand_ins: dict[str, Any] = {
        "ray": types.SimpleNamespace(serve=serve),
        "starlette.requests": types.SimpleNamespace(Request=object),
        "starlette.responses": types.SimpleNamespace(StreamingResponse=Response),
    }
    spec = importlib.util.spec_from_file_location("ray_serve_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # while it is imported
        for name, stand_in in stand_ins.items():
            patch.setitem(sys.modules, name, stand_in)
        spec.loader.exec_module(module)
    module.end = module.Model.__del__  # awaited by Serve; the garbage collector would call it and drop the coroutine
    del module.Model.__del__
    return module


async def replica_of(example: Any, model: str = "dummy") -> Any:
    """A replica as Serve makes it, but in this process."""
    replica = example.Model.__new__(example.Model)
    await example.Model.__init__(replica, model, executor="uni")
    return replica


@pytest.fixture
async def replica(example: Any) -> AsyncIterator[Any]:
    """A replica that is ended as Serve does it."""
    made = await replica_of(example)
    yield made
    await example.end(made)
    assert not made.llm.is_open


async def test_a_replica_streams_what_the_engine_says(
    example: Any, replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunk by chunk, and all of it."""
    params = SamplingParams(max_tokens=64, seed=1)
    monkeypatch.setattr(example, "SamplingParams", lambda **_: params)
    response = await replica(request(prompt="Hello"))
    chunks = [text async for text in response.content]
    assert response.media_type == "text/plain"
    assert len(chunks) > 1
    assert "".join(chunks) == (await replica.llm.complete("Hello", params)).text


async def test_a_client_that_goes_away_aborts_its_request(replica: Any) -> None:
    """Closing the stream, as a cancelled response does, frees its place."""
    stream = (await replica(request())).content
    await anext(stream)
    await stream.aclose()
    statistics = await replica.llm.statistics()
    assert (statistics.num_running, statistics.num_waiting) == (0, 0)


async def test_a_replica_is_unwell_once_its_executor_has_failed_for_good(replica: Any) -> None:
    """Serve asks, and replaces a replica that raises."""
    replica.check_health()
    replica.fail(WorkerDied(0, 1, None, "SIGKILL", "execute_model"))
    with pytest.raises(WorkerDied, match="SIGKILL"):
        replica.check_health()


def test_serve_is_given_the_model_that_was_asked_for(example: Any) -> None:
    """As with ``serve run ray_serve:app model=smollm2``; many requests are let in."""
    cls, arguments, options = example.app({"model": "smollm2"})
    assert (cls, arguments) == (example.Model, ("smollm2",))
    assert options["max_ongoing_requests"] > 100
    assert example.WORKERS.backend == "ray"
