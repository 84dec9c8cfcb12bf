"""One rank's weights to a file of its own, and back; see ``model.sources.sharded``."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors as _safetensors
import safetensors.torch as _safetensors_torch
from torch import Tensor

from aexec.errors import ConfigError, ModelLoadError
from aexec.model.sources.resolve import ModelFiles
from aexec.model.sources.sharded import RankPlace, ShardedState
from aexec.model.transformer.inventory import WholeModel
from aexec.model.transformer.weights import Weights

__all__ = ("fill", "save_rank")

safetensors: Any = _safetensors  # its annotations are partial
safetensors_torch: Any = _safetensors_torch
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_COMMON = ("*.json", "*.jinja", "*.model", "*.txt")
_FILES_OF_WEIGHTS = frozenset({"model.safetensors.index.json"})


def save_rank(weights: Weights, whole: WholeModel, files: ModelFiles, place: RankPlace, directory: Path) -> Path:
    """Write one rank's file; rank 0 writes configuration, tokenizer and index as well.

    Args:
        weights: Of this rank.
        whole: The whole model.
        files: The model's own files.
        place: The rank's place.
        directory: Where to; made if it is not there.

    Returns:
        The rank's file.

    Raises:
        ConfigError: The directory is the model's own.
        OSError: It cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if directory.resolve() == files.directory.resolve():
        raise ConfigError(f"save_sharded_state: {directory} holds the model itself; choose another directory")
    tensors = _unshared(weights)
    path = directory / place.file
    temporary = directory / f".{place.file}"
    safetensors_torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
    temporary.replace(path)
    if (place.tp_rank, place.pp_rank) == (0, 0):
        _copy_common(files.directory, directory)
        dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        ShardedState(place.tp_size, place.pp_size, _DTYPES[dtype], whole.shapes).write(directory)
    return path


def fill(weights: Weights, path: Path, twins: Mapping[str, frozenset[str]]) -> None:
    """Read one rank's file into its model.

    Args:
        weights: Of this rank.
        path: Its file.
        twins: Names of tied weights, of which the file has one.

    Raises:
        ConfigError: It is of a rank with other layers.
        ModelLoadError: It is damaged.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            sources = _sources(weights, set(file.keys()), twins, path)
            for name, source in sources.items():
                weights.put_own(name, file.get_tensor(source))
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is damaged: {error}") from error
    weights.settle()


def _sources(weights: Weights, held: set[str], twins: Mapping[str, frozenset[str]], path: Path) -> dict[str, str]:
    """The name under which the file has each weight: its own, or that of one that it is tied to."""
    found: dict[str, str] = {}
    for name in weights.names:
        source = next((each for each in (name, *sorted(twins.get(name, ()))) if each in held), None)
        if source is not None:
            found[name] = source
    odd = sorted(held.difference(found.values()) | weights.names.difference(found))
    if odd:
        raise ConfigError(
            f"{path} is of a rank with other layers ({odd[0]} for one): "
            "open the executor with the same pipeline_partition"
        )
    return found


def _unshared(weights: Weights) -> dict[str, Tensor]:
    """Of weights that are one tensor, as a tied head, the first."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in weights.tensors():
        found.setdefault(tensor.data_ptr(), (name, tensor))
    return dict(found.values())


def _copy_common(source: Path, target: Path) -> None:
    for pattern in _COMMON:
        for path in source.glob(pattern):
            if path.name not in _FILES_OF_WEIGHTS:
                shutil.copy2(path, target / path.name)
