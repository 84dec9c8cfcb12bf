"""A directory with the weights of each rank in a file of its own, as ``save_sharded_state`` writes it.

Beside the ranks' files are the model's configuration and tokenizer, and an index: how the model
was laid out, and names and shapes of the whole. Each rank reads its own file and no other, so
the layout has to be the same again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aexec.errors import ConfigError, ModelLoadError
from aexec.model.sources.checkpoint import TensorEntry, read_headers
from aexec.model.sources.resolve import ModelFiles

__all__ = ("INDEX", "RankPlace", "ShardedState", "read_index", "whole_entries")

INDEX = "aexec-sharded-state.json"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank's place in the layout.

    Attributes:
        tp_rank: Among those that share its layers.
        tp_size: How many they are.
        pp_rank: Its stage.
        pp_size: How many there are.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    @property
    def file(self) -> str:
        """Name of the rank's file."""
        return f"rank-{self.pp_rank * self.tp_size + self.tp_rank:05}-of-{self.tp_size * self.pp_size:05}.safetensors"


@dataclass(frozen=True, slots=True)
class ShardedState:
    """What the index says.

    Attributes:
        tensor_parallel_size: Of the layout.
        pipeline_parallel_size: Of the layout.
        dtype: Of the weights, as in ``F32``.
        shapes: Of all weights of the whole model.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    dtype: str
    shapes: dict[str, tuple[int, ...]]

    def file_for(self, place: RankPlace, directory: Path) -> Path:
        """The file of a rank.

        Raises:
            ConfigError: The layout is another one.
            ModelLoadError: The file is not there.
        """
        if (place.tp_size, place.pp_size) != (self.tensor_parallel_size, self.pipeline_parallel_size):
            raise ConfigError(
                f"{directory} holds the sharded state of tensor_parallel_size {self.tensor_parallel_size} and "
                f"pipeline_parallel_size {self.pipeline_parallel_size}, and this executor has {place.tp_size} and "
                f"{place.pp_size}: open it with the same layout, or load the model that the state was made from"
            )
        path = directory / place.file
        if not path.is_file():
            raise ModelLoadError(f"{directory} is incomplete: it has no {place.file}; save_sharded_state() did not end")
        return path

    def write(self, directory: Path) -> None:
        """Write the index, whole or not at all."""
        temporary = directory / f".{INDEX}"
        temporary.write_text(json.dumps({"version": _VERSION, **asdict(self)}, indent=1), encoding="utf-8")
        temporary.replace(directory / INDEX)


def read_index(directory: Path) -> ShardedState | None:
    """The index of a directory; None: it holds no sharded state.

    Raises:
        ModelLoadError: It is damaged, or of another version.
    """
    path = directory / INDEX
    try:
        facts: dict[str, Any] = json.loads(path.read_bytes())
        if facts.pop("version") != _VERSION:
            raise ModelLoadError(f"{path} was written by another version of aexec: save the state again")
        shapes = {name: tuple(shape) for name, shape in facts.pop("shapes").items()}
        return ShardedState(shapes=shapes, **facts)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path} is damaged: {error!r}") from error


def whole_entries(files: ModelFiles) -> list[TensorEntry]:
    """All tensors of the whole model, also where files hold the parts of ranks.

    Raises:
        ModelLoadError: A file is damaged.
    """
    entries = read_headers(files.weights)
    state = read_index(files.directory)
    if state is None:
        return entries
    return [TensorEntry(name, state.dtype, shape) for name, shape in state.shapes.items()]
