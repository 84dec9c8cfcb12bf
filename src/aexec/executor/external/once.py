"""A value that comes once, or not at all."""

from __future__ import annotations

from typing import Generic, TypeVar, cast

import anyio

from aexec.executor.copies import own_copy

__all__ = ("Anew", "Once")

T = TypeVar("T")


class Anew(Exception):
    """A rank has begun its start again: so has everybody else to."""


class Once(Generic[T]):
    """A value that somebody waits for. What comes after it is dropped."""

    def __init__(self) -> None:
        self._done = anyio.Event()
        self._value: T | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        state = "open" if not self.is_over else "there" if self._error is None else f"failed: {self._error!r}"
        return f"<Once: {state}>"

    @property
    def is_over(self) -> bool:
        """It has come, or never will."""
        return self._done.is_set()

    @property
    def is_there(self) -> bool:
        """It has come."""
        return self.is_over and self._error is None

    def set(self, value: T) -> None:
        """It is there."""
        if not self.is_over:
            self._value = value
            self._done.set()

    def fail(self, error: BaseException) -> None:
        """It never will be."""
        if not self.is_over:
            self._error = error
            self._done.set()

    async def get(self) -> T:
        """Wait for it; raises what it failed with."""
        await self._done.wait()
        if self._error is not None:
            raise own_copy(self._error)
        return cast("T", self._value)
