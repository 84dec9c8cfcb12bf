"""One rank's weights and KV cache under torch: made, put to sleep, brought back, replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from aexec.config import CacheConfig
from aexec.errors import ConfigError, OutOfMemory, ProtocolError
from aexec.model.memory import give_back_host_memory, resident_host_bytes
from aexec.model.operations import SleptWeights
from aexec.model.sources.resolve import ModelFiles, resolve_model
from aexec.model.sources.sharded import RankPlace, read_index
from aexec.model.transformer.attention import AttentionState, attach, detach
from aexec.model.transformer.inventory import WholeModel, describe_model
from aexec.model.transformer.kv_cache import KVCache
from aexec.model.transformer.loader import LoadedModel, attention_modules, free_bytes
from aexec.model.transformer.sharded_state import fill, save_rank
from aexec.model.transformer.weights import Weights
from aexec.model.update import Inventory

__all__ = ("TorchStore",)

LoadModel = Callable[[ModelFiles], LoadedModel]


class TorchStore:
    """Holds the model and the KV cache of a ``TorchRunner``; a ``model.operations.Store``.

    Args:
        name: The model's own name, as in ``ModelConfig.model``.
        find: Takes a name to files; it may convert them.
        load: Reads this rank's part of the files.
        cache: Sizes of the KV cache.
        device: Where all of it is.
        place: This rank's, for states that are saved by rank; None: it is alone.

    Attributes:
        attention: What the attention modules share.
        num_blocks: Of the KV cache, also while it sleeps; 0 before there was one.
        cache: None: there is none, or it sleeps.
    """

    def __init__(
        self,
        name: str,
        load: LoadModel,
        cache: CacheConfig,
        device: torch.device,
        *,
        find: Callable[[str], ModelFiles] = resolve_model,
        place: RankPlace | None = None,
    ) -> None:
        self._name, self._find, self._load = name, find, load
        self._cache_config, self._device, self._place = cache, device, place or RankPlace()
        self._model: LoadedModel | None = None
        self._weights: Weights | None = None
        self._files: ModelFiles | None = None
        self._whole: WholeModel | None = None
        self.num_blocks = 0
        self.attention = AttentionState()
        self.cache: KVCache | None = None

    def __repr__(self) -> str:
        return f"<TorchStore: {self._weights!r}, {self.cache!r}>"

    # ------------------------------------------------------------ the model

    @property
    def is_loaded(self) -> bool:
        """True while there is a model, whole or not."""
        return self._model is not None

    @property
    def model(self) -> LoadedModel:
        """The model.

        Raises:
            ProtocolError: It was never loaded.
        """
        if self._model is None:
            raise ProtocolError("the model runner was used before load_model")
        return self._model

    @property
    def weights(self) -> Weights:
        """All weights by name."""
        if self._weights is None:
            self._weights = Weights(self.model.module, self.model.shard)
        return self._weights

    def load(self, path: str | None) -> None:
        """Load the weights of ``path``, None: of the model's own files; the ones that are there go first.

        Raises:
            ConfigError: ``path`` holds a model of other shapes; what was loaded is untouched.
            ModelLoadError: The files are damaged.
        """
        files = self._find(path or self._name)
        state = read_index(files.directory)
        own_file = None if state is None else state.file_for(self._place, files.directory)
        before, cache = self._model, self.cache
        if before is not None:
            self._refuse_another(files, before.architecture)
            self._drop_model()
            del before
        model = self._load(files)
        if own_file is not None:
            fill(Weights(model.module), own_file, describe_model(files.directory, model.architecture).twins)
        self._model, self._files = model, files
        if cache is not None:
            attach(attention_modules(self._model.module), cache, self.attention)

    def _refuse_another(self, files: ModelFiles, architecture: str) -> None:
        if self._files is None or files.directory == self._files.directory:
            return
        try:
            its = describe_model(files.directory, architecture)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ConfigError(f"{files.directory} holds no {architecture}: {error}") from error
        if difference := self._described().difference(its):
            raise ConfigError(
                f"{files.directory} holds another model than {self._files.directory}: {difference}; "
                "load_weights() takes other weights of the same model"
            )

    def _drop_model(self) -> None:
        """Before the next one is read: there is no need to hold both."""
        self._model = self._weights = None
        give_back_host_memory()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _described(self) -> WholeModel:
        if self._whole is None:
            assert self._files is not None, "there is a model"
            self._whole = describe_model(self._files.directory, self.model.architecture)
        return self._whole

    # ------------------------------------------------------------ other weights

    def inventory(self) -> Inventory:
        """The names and shapes of all weights."""
        described = self._described()
        return Inventory(shapes=described.shapes, own=self.weights.names, twins=described.twins)

    def shape_of(self, tensor: Any) -> tuple[int, ...]:
        """Shape of a tensor, or of what numpy and torch make one of."""
        return tuple(torch.as_tensor(tensor).shape)

    def put(self, name: str, tensor: Any) -> None:
        """Make ``tensor``, of the whole model, the weight ``name`` of this rank."""
        self.weights.put(name, torch.as_tensor(tensor))

    def own_pending(self) -> None:
        """Depend on no tensor of the caller's any longer."""
        self.weights.own_staged()

    def settle(self) -> None:
        """Every weight that is to come has come."""
        self.weights.settle()

    # ------------------------------------------------------------ sleep

    def sleep_weights(self, *, keep: bool) -> SleptWeights:
        """Take the weights off the device."""
        if not keep:
            return SleptWeights("discarded", self.weights.drop(), self.weights.host_bytes)
        freed = self.weights.offload()
        if self._device.type == "cpu":
            return SleptWeights("kept", freed, self.weights.nbytes)
        return SleptWeights("offloaded", freed, self.weights.host_bytes)

    def wake_weights(self) -> None:
        """Bring back what was kept; what was not takes room as it comes."""
        self.weights.restore()

    def make_first_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache."""
        model = self.model
        self.cache = KVCache(model.kv_shapes, num_blocks, self._cache_config.block_size, model.dtype, model.device)
        self.num_blocks = num_blocks
        attach(attention_modules(model.module), self.cache, self.attention)

    def make_cache(self) -> None:
        """Allocate the KV cache again, as large as it was.

        Raises:
            OutOfMemory: There is no room any longer.
        """
        per_position = sum(shape.bytes_per_position(self.model.dtype) for shape in self.model.kv_shapes.values())
        need, have = per_position * self._cache_config.block_size * self.num_blocks, free_bytes(self._device)
        if need > have:
            raise OutOfMemory(
                f"waking the KV cache of {self.num_blocks} blocks", need, have,
                "free memory (a trainer's copy of the weights?) and call wake_up(['kv_cache']) again",
            )  # fmt: skip
        self.make_first_cache(self.num_blocks)

    def drop_cache(self) -> int:
        """Free the KV cache and the room that attention gathers in; returns bytes."""
        freed = (self.cache.num_bytes if self.cache else 0) + self.attention.num_bytes
        detach(attention_modules(self.model.module))
        self.cache, self.attention = None, AttentionState()
        return freed

    def memory_bytes(self) -> int:
        """In use, after giving back what can be: of the device, on a CPU of the process."""
        give_back_host_memory()
        if self._device.type != "cuda":
            return resident_host_bytes()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(self._device)

    def save(self, directory: str) -> str:
        """Write this rank's weights; the first rank writes all that is common. Returns its file."""
        assert self._files is not None, "there is a model"
        return str(save_rank(self.weights, self._described(), self._files, self._place, Path(directory)))
