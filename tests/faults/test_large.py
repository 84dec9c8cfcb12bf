"""Messages of any size, and little room for them."""

from __future__ import annotations

import asyncio
import sys

import pytest

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_files_are_left")]

SIZES = [1, 1 << 10, (1 << 16) - 100, 1 << 16, (1 << 20) + 1, 10_000_000, 64 << 20]


async def test_any_size_arrives(open_faulty):
    """G15: there and back, whole; the frames' bound, the arena's and the socket's show nowhere."""
    whole = bytes(range(256)) * (SIZES[-1] // 256 + 1)
    async with open_faulty(ranks=2) as executor:
        for size in SIZES:
            data = whole[:size]
            found = await executor.collective_rpc("echo", (data,), timeout=50.0)
            assert [answer == data for answer in found] == [True, True]


async def test_a_quarter_of_a_gigabyte_arrives(open_faulty):
    """G15: by ways of its own, as it is larger than any frame or block; the executor goes on."""
    size = 256 << 20
    async with open_faulty(ranks=1) as executor:
        assert await executor.collective_rpc("length", (bytes(size),), timeout=50.0) == [size]
        (answer,) = await executor.collective_rpc("zeros", (size,), timeout=50.0)
        assert len(answer) == size
        assert await executor.collective_rpc("echo", (1,)) == [1]


async def test_many_large_messages_at_once_take_their_turn(open_faulty):
    """G15, G16: more than any arena holds at a time, from eight callers, and back."""
    async with open_faulty(ranks=2) as executor:

        async def call(number):
            data = bytes([number]) * 9_000_000
            assert await executor.collective_rpc("echo", (data,), timeout=50.0) == [data] * 2

        await asyncio.gather(*(call(number) for number in range(8)))


def test_a_small_shared_memory_is_enough(start):
    """G16: four ranks in a container whose /dev/shm holds 16 MB: starts, and passes 30 MB to each of them."""
    program = start(
        "",
        command=[
            "unshare",
            "--mount",
            "--",
            "sh",
            "-c",
            'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$0" -c "$1"',
            sys.executable,
            SMALL,
        ],
    )
    output, errors, code = program.finish(50.0)
    assert (output, errors, code) == ("[30000000, 30000000, 30000000, 30000000]\n", "", 0)


SMALL = """
import asyncio, os
from aexec import ExecutorConfig, ParallelConfig, open_executor

async def main():
    assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 16 << 20
    layout = ParallelConfig(pipeline_parallel_size=4)
    config = ExecutorConfig(backend="mp", parallel=layout, worker_cls="aexec.testing.faulty:FaultyWorker")
    async with open_executor(config) as executor:
        print(await executor.collective_rpc("length", (bytes(30_000_000),)))
        assert os.listdir("/dev/shm") == []

asyncio.run(main())
"""
