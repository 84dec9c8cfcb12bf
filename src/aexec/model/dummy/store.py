"""The dummy's weights, which are one number, and its simulated KV cache; a ``model.operations.Store``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from aexec.errors import ConfigError
from aexec.model.dummy.distribution import DummyDistribution
from aexec.model.dummy.ledger import BatchLedger
from aexec.model.dummy.settings import DummySettings
from aexec.model.memory import resident_host_bytes
from aexec.model.operations import SleptWeights
from aexec.model.update import Inventory

__all__ = ("DummyStore",)

_INVENTORY = Inventory(shapes={"seed": ()}, own=frozenset({"seed"}))
_SEED_BYTES = 8
_SAVED = "dummy.txt"


class DummyStore:
    """Of one dummy runner.

    Args:
        settings: As its name says them.
        make_ledger: Makes an empty KV cache.

    Attributes:
        distribution: What it says; another seed is another model.
        ledger: Its KV cache; None: there is none, or it sleeps.
    """

    def __init__(self, settings: DummySettings, make_ledger: Callable[[], BatchLedger]) -> None:
        self._settings, self._make_ledger = settings, make_ledger
        self.distribution = DummyDistribution(settings)
        self.ledger: BatchLedger | None = None
        self.is_loaded = False

    def __repr__(self) -> str:
        return f"<DummyStore: {self._settings}, {self.ledger!r}>"

    def load(self, path: str | None) -> None:
        """Take the seed of ``path``, as in ``dummy:seed=3`` or a saved directory; None: the own one.

        Raises:
            ConfigError: ``path`` differs in more than the seed.
        """
        its = self._settings if path is None else DummySettings.parse(_saved_name(path))
        if dataclasses.replace(its, seed=self._settings.seed) != self._settings:
            raise ConfigError(f"{path} is another dummy than {self._settings}: expected one that differs in its seed")
        self._say(its.seed)
        self.is_loaded = True

    def inventory(self) -> Inventory:
        """One number, ``seed``."""
        return _INVENTORY

    def shape_of(self, tensor: Any) -> tuple[int, ...]:
        """As numpy sees it."""
        return np.shape(tensor)

    def put(self, name: str, tensor: Any) -> None:  # noqa: ARG002  # there is one name
        """Take a new seed."""
        self._say(int(tensor))

    def own_pending(self) -> None:
        """Nothing waits."""

    def settle(self) -> None:
        """Nothing waits."""

    def sleep_weights(self, *, keep: bool) -> SleptWeights:
        """A number sleeps where it is."""
        return SleptWeights("kept", 0, _SEED_BYTES) if keep else SleptWeights("discarded", _SEED_BYTES, 0)

    def wake_weights(self) -> None:
        """There is nothing to bring back."""

    def drop_cache(self) -> int:
        """Forget the KV cache; returns its bytes."""
        freed = 0 if self.ledger is None else self.ledger.num_bytes
        self.ledger = None
        return freed

    def make_cache(self) -> None:
        """An empty KV cache."""
        self.ledger = self._make_ledger()

    def save(self, directory: str) -> str:
        """Write the name of a dummy that has its settings; all ranks write the same."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        path = Path(directory) / _SAVED
        path.write_text(str(self.distribution.settings), encoding="utf-8")
        return str(path)

    def memory_bytes(self) -> int:
        """Of the process."""
        return resident_host_bytes()

    def _say(self, seed: int) -> None:
        self.distribution = DummyDistribution(dataclasses.replace(self._settings, seed=seed))


def _saved_name(path: str) -> str:
    saved = Path(path) / _SAVED
    return saved.read_text(encoding="utf-8") if saved.is_file() else path
