"""What ``import aexec`` costs, and what a worker process does without."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMIT_MS = 150.0
HEAVY = ("torch", "ray", "zmq", "transformers", "numpy", "anyio", "structlog", "msgspec", "asyncio")
MEASURE = """
import sys, time
start = time.perf_counter()
import aexec
print((time.perf_counter() - start) * 1e3)
print(*(name for name in {names!r} if name in sys.modules))
"""

ON_A_LOOP = """
import asyncio, sys
from aexec import ActorSystem

async def main():
    async with ActorSystem():
        pass

before = set(sys.modules)
asyncio.run(main())
print(*(name for name in sys.modules if name not in before and not name.startswith("aexec.")))
"""


def imported() -> tuple[float, list[str]]:
    """Import aexec in a fresh interpreter; return milliseconds and the heavy modules it loaded."""
    command = [sys.executable, "-c", MEASURE.format(names=HEAVY)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    milliseconds, loaded = output.split("\n")[:2]
    return float(milliseconds), loaded.split()


def test_importing_aexec_is_quick() -> None:
    """The best of five imports takes less than 150 ms."""
    assert min(imported()[0] for _ in range(5)) < LIMIT_MS


def test_importing_aexec_loads_nothing_heavy() -> None:
    """No torch, no ray, no zmq, no transformers; not even the core's own dependencies."""
    assert imported()[1] == []


def test_opening_a_system_imports_no_library_on_the_loop() -> None:
    """Anyio's half for asyncio took the loop's first turn 35 ms: it is there before any loop runs."""
    command = [sys.executable, "-c", ON_A_LOOP]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split() == []


@pytest.mark.parametrize("module", ["aexec.worker.process", "aexec.executor.ray.worker_actor"])
def test_a_worker_process_imports_nothing_of_its_drivers(module: str) -> None:
    """No actors, and no structlog, which takes rich along where that is: together a third of what it would import."""
    program = f"import sys, {module}; print(*(name for name in ('structlog', 'aexec.actor') if name in sys.modules))"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split() == []
