from __future__ import annotations

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

ACTOR = """
import os, pytest
from aexec import Actor, ActorSystem, Message, handles

class Increment(Message[int], frozen=True):
    pass

class Counter(Actor):
    value = 0

    @handles(Increment)
    def increment(self, message: Increment) -> int:
        self.value += 1
        return self.value
"""
TESTS = (
    ACTOR
    + """
@pytest.fixture
async def counter(actors):
    return await actors.spawn(Counter)

async def test_the_system_is_open(actors, counter):
    assert await counter.ask(Increment()) == 1
    assert actors.statistics().actors == 1

async def test_each_test_has_its_own(actors, counter):
    assert await counter.ask(Increment()) == 1

async def test_the_factory_takes_settings(actor_system_factory):
    first = await actor_system_factory(name="first", mailbox=1)
    second = await actor_system_factory(check_messages=True)
    assert (first.name, second.name) == ("first", "test")
    assert await (await second.spawn(Counter)).ask(Increment()) == 1

async def test_virtual_time_leaps(virtual_actors, virtual_clock):
    await virtual_actors.sleep(3600.0)
    assert virtual_clock.now() == 3600.0

async def test_a_system_of_a_wider_scope_serves(shared, actors):
    assert await shared.ask(Increment()) == 1

async def test_a_system_of_a_wider_scope_serves_on(shared):
    assert await shared.ask(Increment()) == 2

async def test_an_actor_that_is_left_is_ended_and_one_in_another_system_is_a_leak(actors):
    await actors.spawn(Counter)
    left = ActorSystem(name="left")
    await left.open()
    pytest.left = left  # nobody closes it

def test_a_plain_test_may_be_checked(leak_check):
    pytest.straggler = os.open(os.devnull, os.O_RDONLY)
"""
)
SHARED = """
@{decorator}
async def shared({arguments}):
    async with ActorSystem(name="shared") as system:
        yield await system.spawn(Counter)
"""
LEAKS = [
    "*ERROR at teardown of test_an_actor_that_is_left_is_ended_and_one_in_another_system_is_a_leak*",
    "*actor system left, open on*",
    "*ERROR at teardown of test_a_plain_test_may_be_checked*",
    "*fd * to /dev/null*",
]
# A test that leaks on purpose is given up at once.
IMPATIENT = """
import functools, aexec.testing
aexec.testing.LeakCheck = functools.partial(aexec.testing.LeakCheck, patience=0.0)
"""


@pytest.fixture
def run(pytester: pytest.Pytester):
    """Runs tests in a process of their own, with the plugin and no settings of ours."""
    pytester.makeconftest(IMPATIENT)

    def run(source: str, *flags: str) -> pytest.RunResult:
        pytester.makepyfile(source)
        plugin = () if _is_installed() else ("-p", "aexec.integrations.pytest_plugin")
        return pytester.runpytest_subprocess("-p", "no:randomly", *plugin, *flags, timeout=50)

    return run


def _is_installed() -> bool:
    from importlib.metadata import entry_points

    return "aexec.integrations.pytest_plugin" in entry_points(group="pytest11").names


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_it_works_under_anyios_plugin(run, backend):
    """Fixtures of every scope, with and without pytest-asyncio beside it; what is left fails the test."""
    shared = SHARED.format(decorator='pytest.fixture(scope="module")', arguments="anyio_backend")
    backends = f"\n@pytest.fixture(scope='session')\ndef anyio_backend():\n    return {backend!r}\n"
    flags = ["-o", "asyncio_default_fixture_loop_scope=function"] if backend == "asyncio" else ["-p", "no:asyncio"]
    result = run(TESTS + shared + backends + "\npytestmark = pytest.mark.anyio\n", *flags)
    result.assert_outcomes(passed=8, errors=2)
    result.stdout.fnmatch_lines(LEAKS)


@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_it_works_under_pytest_asyncio(run, mode):
    """In both of its modes, without anyio's plugin; a fixture and its test run in different tasks."""
    decorator = 'pytest_asyncio.fixture(scope="module", loop_scope="module")'
    shared = SHARED.format(decorator=decorator, arguments="")
    source = TESTS.replace("import os, pytest", "import os, pytest, pytest_asyncio")
    source = source.replace(
        "async def test_a_system_of", '@pytest.mark.asyncio(loop_scope="module")\nasync def test_a_system_of'
    )
    source = source.replace("serves(shared, actors)", "serves(shared)")  # actors is on the loop of its own scope
    if mode == "strict":
        source = source.replace("\n\nasync def test_", "\n\n@pytest.mark.asyncio\nasync def test_")
        source = source.replace("@pytest.fixture", "@pytest_asyncio.fixture")
    flags = ["-p", "no:anyio", "-o", f"asyncio_mode={mode}", "-o", "asyncio_default_fixture_loop_scope=function"]
    result = run(source + shared, *flags)
    result.assert_outcomes(passed=8, errors=2)
    result.stdout.fnmatch_lines(LEAKS)


def test_all_tests_are_checked_when_the_configuration_says_so(run, pytester):
    """One line of it; without, a test is left alone."""
    source = "import os, pytest\n\ndef test_leak():\n    pytest.left = os.open(os.devnull, os.O_RDONLY)\n"
    run(source).assert_outcomes(passed=1)
    pytester.makeini("[pytest]\naexec_leak_check = true\n")
    run(source).assert_outcomes(passed=1, errors=1)


def test_the_plugin_loads_nothing_until_it_is_used():
    """Other people's suites pay for an import of a hundred lines, and of how a package imports its names."""
    program = (
        "import pytest, sys; before = set(sys.modules); import aexec.integrations.pytest_plugin\n"
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "['aexec', 'aexec.integrations', 'aexec.integrations.pytest_plugin', 'aexec.lazy']\n"
