"""Operations on one rank's loaded model: sleep, wake up, load again, take new weights.

What is allowed when is decided here, by ``model.residency`` and ``model.update``, for every
model runner alike; where the bytes go is the business of the runner's :class:`Store`.
All of it blocks, and runs on the compute thread between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, cast

from aexec.errors import ConfigError, ModelNotReady, WeightsMismatch, note
from aexec.messages.operations import NamedTensors, SleepReport, WakeReport, WeightsReport, pairs_of
from aexec.model.residency import Residency, WeightsEvent, WeightsState, sleep_event, wake_tags
from aexec.model.update import Inventory, WeightUpdate

__all__ = ("ModelOperations", "SleptWeights", "Store")

_HALF = "the weights are half updated and nothing runs: send the update again, whole, or call load_weights()"
_UNTOUCHED = "the weights are what they were"


class SleptWeights(NamedTuple):
    """What became of weights that were put to sleep; see ``SleepReport``."""

    where: Literal["kept", "offloaded", "discarded"]
    freed_bytes: int
    held_bytes: int


class Store(Protocol):
    """One rank's weights and KV cache, as bytes."""

    def load(self, path: str | None) -> None:
        """Load the weights of ``path``, None: of the model's own files.

        Raises:
            ConfigError: It is another model; what was loaded is untouched.
            ModelLoadError: The files are damaged.
        """
        ...

    @property
    def is_loaded(self) -> bool:
        """True while there is a model, whole or not."""
        ...

    def inventory(self) -> Inventory:
        """The names and shapes of all weights."""
        ...

    def shape_of(self, tensor: Any) -> tuple[int, ...]:
        """Shape of what somebody calls a tensor."""
        ...

    def put(self, name: str, tensor: Any) -> None:
        """Make ``tensor``, of the whole model, the weight ``name`` of this rank; it may be kept until settled."""
        ...

    def own_pending(self) -> None:
        """Depend on no tensor of the caller's any longer."""
        ...

    def settle(self) -> None:
        """Every weight that is to come has come."""
        ...

    def sleep_weights(self, *, keep: bool) -> SleptWeights:
        """Take the weights off the device."""
        ...

    def wake_weights(self) -> None:
        """Bring back what was kept; make room for what was not."""
        ...

    def drop_cache(self) -> int:
        """Free the KV cache; returns its bytes."""
        ...

    def make_cache(self) -> None:
        """Allocate the KV cache again, as large as it was.

        Raises:
            OutOfMemory: There is no room any longer.
        """
        ...

    def save(self, directory: str) -> str:
        """Write this rank's weights; returns the file."""
        ...

    def memory_bytes(self) -> int:
        """Memory in use, after giving back what can be."""
        ...


class ModelOperations:
    """What may be done with a loaded model beside running it.

    Args:
        store: The rank's weights and KV cache.
        forget: Called with the reason when what the KV cache held is void.
        num_pending: Tells how many forward passes wait for their sampling.
    """

    def __init__(self, store: Store, forget: Callable[[str], None], num_pending: Callable[[], int]) -> None:
        self._store, self._forget, self._num_pending = store, forget, num_pending
        self.residency = Residency()
        self._update: WeightUpdate | None = None
        self._before = WeightsState.UNLOADED

    def __repr__(self) -> str:
        return f"<ModelOperations: {self.residency!r}, {self._update!r}>"

    def require_ready(self, wanted: str) -> None:
        """Refuse to run on anything but whole weights and a KV cache.

        Raises:
            ModelNotReady: Something is asleep, missing or half updated.
        """
        self.residency.require_ready(wanted)

    # ------------------------------------------------------------ sleep

    def sleep(self, level: int = 1) -> SleepReport:
        """Give memory back; requests that the runner knew are forgotten with their KV.

        Args:
            level: 1: the KV cache is dropped and the weights are moved to host memory (on a
                CPU they are there: they stay). 2: the weights are discarded as well.

        Raises:
            ModelNotReady: Forward passes wait for their sampling, or an update is half done.
            ConfigError: There is no such level.
        """
        event = sleep_event(level)
        self.residency.check(event)
        self._refuse_pending(event.value)
        before = self._store.memory_bytes()
        freed_cache = self._store.drop_cache()
        self.residency.cache_dropped()
        self.residency.move(event)
        self._update = None
        self._forget(f"its KV went with sleep level {level}")
        slept = self._store.sleep_weights(keep=self.residency.weights is WeightsState.ASLEEP)
        return SleepReport(
            level=cast("Literal[1, 2]", level),
            weights=slept.where,
            freed_weights_bytes=slept.freed_bytes,
            freed_cache_bytes=freed_cache,
            held_bytes=slept.held_bytes,
            memory_before=before,
            memory_after=self._store.memory_bytes(),
        )

    def wake_up(self, tags: Iterable[str] | None = None) -> WakeReport:
        """Bring back what sleeps; nothing happens to what is awake.

        Args:
            tags: Any of ``weights`` and ``kv_cache``; None: both. One by one they leave room
                for a trainer's copy of the weights in between.

        Returns:
            What there is now; after sleep level 2 the weights are ``missing`` until
            ``load_weights`` or ``update_weights``.

        Raises:
            ConfigError: A tag is unknown.
            OutOfMemory: The KV cache finds no room any longer.
        """
        wanted, residency = wake_tags(tags), self.residency
        if "weights" in wanted and residency.weights in (WeightsState.ASLEEP, WeightsState.DISCARDED):
            self._store.wake_weights()
            residency.move(WeightsEvent.WAKE)
        if "kv_cache" in wanted and residency.cache_sleeps:
            self._store.make_cache()
            residency.cache_made()
        return self.report()

    def report(self) -> WakeReport:
        """What of the model is in memory now."""
        weights: Literal["ready", "asleep", "missing"] = "missing"
        if self.residency.weights is WeightsState.READY:
            weights = "ready"
        elif self.residency.weights in (WeightsState.ASLEEP, WeightsState.DISCARDED):
            weights = "asleep"
        return WakeReport(weights=weights, kv_cache="asleep" if self.residency.cache_sleeps else "ready")

    # ------------------------------------------------------------ weights

    def load_weights(self, path: str | None = None) -> WeightsReport:
        """Load the weights from files, as a start does.

        Args:
            path: Another directory with a model of the same shapes; None: the model's own files.

        Raises:
            ModelNotReady: The weights are asleep, or forward passes wait for their sampling.
            ConfigError: ``path`` holds a model of other shapes; nothing was changed.
            ModelLoadError: The files are damaged; if that shows too late the rank has no
                weights, and runs nothing until a load succeeds.
        """
        self.residency.check(WeightsEvent.LOADED)
        self._refuse_pending("load_weights")
        self.residency.disturb()
        try:
            self._store.load(path)
        except BaseException:
            if not self._store.is_loaded and WeightsState.UNLOADED is not self.residency.weights:
                self.residency.move(WeightsEvent.LOST)
            raise
        self.residency.move(WeightsEvent.LOADED)
        self._update = None
        self._forget("its KV is that of other weights")
        return WeightsReport(version=self.residency.version, applied=tuple(sorted(self._store.inventory().own)))

    def start_weight_update(self) -> None:
        """Begin an update in chunks; nothing runs until it is finished.

        Raises:
            ModelNotReady: The weights are asleep, another update is under way, or forward
                passes wait for their sampling.
        """
        self._refuse_pending(WeightsEvent.START.value)
        self._before = self.residency.move(WeightsEvent.START)
        self._update = WeightUpdate(self._store.inventory())

    def update_weights(self, named_tensors: NamedTensors, *, partial: bool = False) -> WeightsReport:
        """Take new weights: a chunk between start and finish, else a whole update.

        Args:
            named_tensors: Full tensors (also of a model that is spread over ranks) by the
                names of the ``transformers`` model's ``state_dict()``. A mapping or a list is
                checked before anything is changed, an iterator tensor by tensor.
            partial: Outside of start and finish: leave weights that do not come as they are.

        Raises:
            WeightsMismatch: Names, shapes, or what is missing; all are named.
            ModelNotReady: The weights are asleep, or forward passes wait for their sampling.
        """
        if self._update is not None:
            return self._take(self._update, named_tensors)
        self.start_weight_update()
        try:
            self.update_weights(named_tensors)
            return self.finish_weight_update(partial=partial)
        except BaseException as error:
            note(error, _UNTOUCHED if self.cancel_weight_update() else _HALF)
            raise

    def finish_weight_update(self, *, partial: bool = False) -> WeightsReport:
        """End an update: from here on the new weights run, on an empty KV cache.

        Args:
            partial: Leave weights that did not come as they are; not after sleep level 2.

        Raises:
            WeightsMismatch: Some are missing; send them and finish again.
            ModelNotReady: No update was started.
        """
        self.residency.check(WeightsEvent.FINISH)
        update = cast("WeightUpdate", self._update)
        missing = update.missing()
        if missing and not (partial and self._before is WeightsState.READY):
            raise WeightsMismatch(missing=missing, state="send them and finish again, or call load_weights()")
        self._store.settle()
        self.residency.move(WeightsEvent.FINISH)
        self._update = None
        self._forget("its KV is that of other weights")
        return WeightsReport(version=self.residency.version, applied=update.applied, elsewhere=update.elsewhere)

    def cancel_weight_update(self) -> bool:
        """Give an update up; False: some weights have changed, so that it has to be finished."""
        if self._update is None or not self._update.is_untouched:
            return False
        self.residency.put_back(self._before)
        self._update = None
        return True

    def save_sharded_state(self, directory: str) -> str:
        """Write this rank's weights as they are now, to be loaded by a rank of the same place.

        Returns:
            The file that this rank wrote.

        Raises:
            ModelNotReady: The weights are not whole.
            ConfigError: The directory cannot be written to.
        """
        self.residency.require_weights("save_sharded_state")
        try:
            return self._store.save(directory)
        except OSError as error:
            raise ConfigError(
                f"save_sharded_state: {directory} cannot be written ({error.strerror or error})"
            ) from error

    def _take(self, update: WeightUpdate, named_tensors: NamedTensors) -> WeightsReport:
        pairs = pairs_of(named_tensors)
        checked = isinstance(pairs, Sequence)
        if checked:
            update.check(
                ((name, self._store.shape_of(tensor)) for name, tensor in pairs), "nothing of this call was applied"
            )
        for name, tensor in pairs:
            if not checked:
                update.check([(name, self._store.shape_of(tensor))], "")
            for target in update.take(name):
                self._store.put(target, tensor)
        self._store.own_pending()
        version = self.residency.version
        return WeightsReport(version=version, applied=update.applied, elsewhere=update.elsewhere, is_complete=False)

    def _refuse_pending(self, wanted: str) -> None:
        if count := self._num_pending():
            raise ModelNotReady(
                wanted, f"{count} forward pass(es) wait for their sampling", "sample them first, as pause() does"
            )
