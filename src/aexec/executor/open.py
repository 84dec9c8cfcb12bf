"""``open_executor(...)``: to be awaited, or entered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from aexec.executor.base import Executor

__all__ = ("Opening",)


class Opening:
    """An executor that is to be opened.

    ``executor = await opening`` leaves the closing to you; ``async with opening as
    executor`` closes it at the end of the block. Nothing happens before.

    Args:
        start: Opens it.
    """

    def __init__(self, start: Callable[[], Awaitable[Executor]]) -> None:
        self._start = start
        self._executor: Executor | None = None

    def __repr__(self) -> str:
        return (
            "<an executor that is not open yet: `executor = await open_executor(config)`, or "
            "`async with open_executor(config) as executor`>"
        )

    def __await__(self) -> Generator[Any, Any, Executor]:
        """Open it."""
        return self._start().__await__()

    if not TYPE_CHECKING:  # a type checker says so by itself

        def __getattr__(self, name: str) -> Any:
            """It is no executor yet."""
            raise AttributeError(
                f"{name!r} is asked of an executor that is not open yet: open it with "
                "`async with open_executor(config) as executor`, or `executor = await open_executor(config)`"
            )

    async def __aenter__(self) -> Executor:
        """Open it."""
        self._executor = await self._start()
        return self._executor

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        executor, self._executor = self._executor, None
        if executor is not None:
            await executor.close()
