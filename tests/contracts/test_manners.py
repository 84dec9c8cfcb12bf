from __future__ import annotations

import subprocess
import sys
import time

import pytest

OPEN = {
    "system": ("from aexec import ActorSystem", "ActorSystem()", "system.statistics()"),
    "executor": (
        "from aexec import ExecutorConfig, open_executor\nfrom aexec.testing.workers import ProbeWorker",
        "open_executor(ExecutorConfig(backend='uni', worker_cls=ProbeWorker))",
        "await system.collective_rpc('read_log')",
    ),
    "llm": (
        "from aexec import AsyncLLM, SamplingParams",
        "AsyncLLM('dummy')",
        "[chunk async for chunk in system.generate([1, 2], SamplingParams(max_tokens=2))]",
    ),
}
TEN_ROUNDS = """
import asyncio, signal
from aexec.testing import LeakCheck
{imports}

async def main():
    async with LeakCheck(), {opened} as system:
        {use}

def handlers():
    return [signal.getsignal(number) for number in signal.valid_signals()]

asyncio.run(main())  # whatever is made once in a process is made now
before = handlers()
with LeakCheck():
    for _ in range(10):
        asyncio.run(main())
        assert handlers() == before
print("clean")
"""
FORGETFUL = """
import asyncio
{imports}

async def main():
    system = {opened}
    system = await (system.open() if hasattr(system, "open") else system)
    {use}
    print("used", flush=True)

asyncio.run(main())
"""


def run(program: str, name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    imports, opened, use = OPEN[name]
    program = program.format(imports=imports, opened=opened, use=use)
    return subprocess.run(
        [sys.executable, *flags, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )


@pytest.mark.parametrize("name", OPEN)
def test_ten_loops_one_after_the_other_leave_nothing_behind(name):
    """G26, G20: no actor, task, thread, process or descriptor is left, and no signal handler is touched."""
    done = run(TEN_ROUNDS, name, "-W", "error")
    assert (done.stdout, done.stderr, done.returncode) == ("clean\n", "", 0)


@pytest.mark.parametrize("name", OPEN)
def test_a_program_that_forgets_to_close_ends(name):
    """G27: within three seconds after its last line, with its own exit code and a ResourceWarning."""
    imports, opened, use = OPEN[name]
    program = FORGETFUL.format(imports=imports, opened=opened, use=use)
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "used\n"
        began = time.monotonic()
        _, errors = process.communicate(timeout=20)
    assert time.monotonic() - began < 3.0
    assert process.returncode == 0
    assert "ResourceWarning" in errors
    assert "Traceback" not in errors
