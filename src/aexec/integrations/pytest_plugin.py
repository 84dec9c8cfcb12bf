"""Fixtures for tests of actors, and a look at what a test leaves behind.

pytest finds the plugin by itself once aexec is installed, and an idle one costs nothing:
it imports the actor core with the first fixture. Async tests are run by whichever plugin
runs them (anyio's or pytest-asyncio), on its loop.

* ``actors``: an open actor system; a test that leaves a task or descriptor behind fails.
* ``virtual_actors``: the same in virtual time, with its clock in ``virtual_clock``.
* ``actor_system_factory``: opens more of them, with settings.
* ``leak_check``: fails a test of any kind that leaves something behind. With
  ``aexec_leak_check = true`` in the configuration of pytest, all tests have it.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from aexec.actor import ActorSystem
    from aexec.testing import VirtualClock

__all__ = ("actor_system_factory", "actors", "leak_check", "virtual_actors", "virtual_clock")

LEAK_CHECK = "aexec_leak_check"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The settings of this plugin."""
    parser.addini(LEAK_CHECK, "fail every test that leaves something behind (aexec)", type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    """Give all tests a leak check, if that is asked for."""
    if config.getini(LEAK_CHECK):
        config.pluginmanager.register(_LeakCheckForAll(), "aexec-leak-check")


class _LeakCheckForAll:
    @pytest.fixture(autouse=True)
    def _leak_check_for_all(self, leak_check: None) -> None:
        """Every test has the fixture."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Generator[None, Any, Any]:
    """Let pytest-asyncio run our fixtures in tests that it runs, in its strict mode too.

    anyio's plugin takes any async fixture of its tests; pytest-asyncio those that are
    marked as its ``fixture`` marks them, and it may not be installed where we are written.
    """
    function = fixturedef.func
    if getattr(function, "__module__", "") == __name__ and inspect.isasyncgenfunction(function):
        function._force_asyncio_fixture = _is_for_pytest_asyncio(request)  # noqa: SLF001
    return (yield)


def _is_for_pytest_asyncio(request: Any) -> bool:
    return request.config.pluginmanager.hasplugin("asyncio") and "anyio_backend" not in request.fixturenames


@pytest.fixture
def leak_check() -> Iterator[None]:
    """Fails a test that leaves an actor, thread, child process, descriptor or shared memory behind."""
    from aexec.testing import LeakCheck

    with LeakCheck():
        yield


@pytest.fixture
async def actor_system_factory() -> AsyncIterator[Callable[..., Awaitable[ActorSystem]]]:
    """Opens actor systems, with the settings of ``ActorSystem``; they are closed after the test.

    ::

        system = await actor_system_factory(check_messages=True)
    """
    from aexec.actor import ActorSystem
    from aexec.testing import LeakCheck

    async with LeakCheck(), AsyncExitStack() as stack:

        async def make(**settings: Any) -> ActorSystem:
            return await stack.enter_async_context(ActorSystem(**cast("dict[str, Any]", {"name": "test", **settings})))

        yield make


@pytest.fixture
async def actors() -> AsyncIterator[ActorSystem]:
    """An actor system that is open for the test; after it, nothing may be left."""
    from aexec.actor import ActorSystem
    from aexec.testing import LeakCheck

    async with LeakCheck(), ActorSystem(name="test") as system:
        yield system


@pytest.fixture
def virtual_clock() -> VirtualClock:
    """The clock of ``virtual_actors``, which leaps to the next deadline when all tasks wait."""
    from aexec.testing import VirtualClock

    return VirtualClock()


@pytest.fixture
async def virtual_actors(virtual_clock: VirtualClock) -> AsyncIterator[ActorSystem]:
    """An actor system in virtual time, open for the test; after it, nothing may be left."""
    from aexec.actor import ActorSystem
    from aexec.testing import LeakCheck

    async with LeakCheck(), ActorSystem(name="test", clock=virtual_clock) as system:
        yield system
