"""Strangers come to the port of a leader whose ranks, here and on another node, are generating."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import resource
import socket

import pytest
import structlog
import zmq

from aexec import AsyncLLM, ExecutorConfig, ParallelConfig, SamplingParams
from aexec.config import CacheConfig, ModelConfig
from aexec.testing.nodes import open_on_nodes
from aexec.transport.curve import NodeKey

pytestmark = pytest.mark.anyio

IDLE = 1000
PROMPTS = ["The capital of France is", "Two and two", "The sea"] * 4
PARAMS = SamplingParams(max_tokens=64, temperature=0.0)


@contextlib.contextmanager
def many_descriptors():
    """As many as the strangers need, who are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(3 * IDLE, hard)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def strangers(host, port):
    """Without a key, with a wrong one, with nothing sensible to say, and a thousand who say nothing at all."""
    wrong = NodeKey.random()
    public, secret = wrong.curve_keys("follower")
    keys = [
        {},
        {"curve_serverkey": wrong.curve_keys("leader")[0], "curve_publickey": public, "curve_secretkey": secret},
    ]
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        for settings in keys:
            sock = stack.enter_context(context.socket(zmq.DEALER))
            sock.linger = 0
            for name, value in settings.items():
                setattr(sock, name, value)
            sock.connect(f"tcp://{host}:{port}")
            sock.send(pickle.dumps(print), zmq.NOBLOCK)
        for number in range(IDLE + 20):
            plain = stack.enter_context(socket.socket())
            plain.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                plain.connect((host, port))
            if number < 20:
                with contextlib.suppress(OSError):
                    plain.send(b"GET / HTTP/1.1\r\n\r\n" * 50)
        yield


async def answers(llm):
    """All at once."""
    return [each.token_ids for each in await asyncio.gather(*(llm.complete(prompt, PARAMS) for prompt in PROMPTS))]


async def test_a_generation_does_not_notice_strangers():
    """G50: the same tokens, in a time that a reader does not call a stall, and one line of log."""
    async with AsyncLLM("dummy", executor="uni") as alone:
        expected = await answers(alone)
    config = ExecutorConfig(
        nnodes=2,
        parallel=ParallelConfig(2, 2),
        worker_output="none",
        worker_kwargs={"model_config": ModelConfig(model="dummy"), "cache_config": CacheConfig(num_blocks=200)},
    )
    with many_descriptors(), structlog.testing.capture_logs() as logs:
        async with open_on_nodes(config) as executor, AsyncLLM("dummy", executor=executor) as llm:
            before = asyncio.ensure_future(answers(llm))
            with strangers(executor.config.master_addr, executor.config.master_port):
                assert await asyncio.wait_for(before, 30.0) == expected
                assert await asyncio.wait_for(answers(llm), 30.0) == expected
            assert (await executor.check_health()).healthy
    (entry,) = [entry for entry in logs if entry["log_level"] in ("warning", "error")]
    assert "turned away" in entry["event"]
