"""From the name of a model to a directory in Hugging Face's layout.

A name is ``smollm2``, a directory with ``config.json`` and ``*.safetensors``, or a GGUF
file, which is converted once and kept. Nothing is ever downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aexec.errors import ModelLoadError, ModelNotFound
from aexec.model.base import LoadProgress
from aexec.model.sources.smollm2 import find_smollm2

__all__ = ("ModelFiles", "open_directory", "resolve_model")

_EXPECTED = 'expected "smollm2", "dummy", a directory in Hugging Face\'s layout or a GGUF file'


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's files.

    Attributes:
        name: What the user asked for.
        directory: Holds ``config.json``, the weights and the tokenizer.
        config: ``config.json``, parsed.
        weights: The safetensors files.
    """

    name: str
    directory: Path
    config: Mapping[str, Any]
    weights: tuple[Path, ...]

    @property
    def model_type(self) -> str:
        """As in ``llama``; empty when the configuration names none."""
        return str(self.config.get("model_type", ""))


def resolve_model(name: str, *, progress: LoadProgress | None = None, cache_dir: Path | None = None) -> ModelFiles:
    """Find a model; convert it first if it is a GGUF file that was not converted before.

    Args:
        name: As in ``ModelConfig.model``.
        progress: Told of the conversion.
        cache_dir: Where conversions are kept; None takes the user's cache directory.

    Raises:
        ModelNotFound: The name leads nowhere, or to a directory without a model.
        ModelLoadError: The files are damaged.
        MissingExtra: A conversion is due and needs libraries that are not installed.
    """
    path = find_smollm2() if name == "smollm2" else Path(name).expanduser()
    if path.is_dir():
        return open_directory(path, name)
    if path.is_file():
        from aexec.model.sources.gguf_files import converted

        return open_directory(converted(path, progress=progress, cache_dir=cache_dir), name)
    if name == "dummy":
        raise ModelNotFound("the model 'dummy' has no files: its tokens come from a hash")
    hint = "; models are not downloaded" if name.count("/") == 1 and not path.parent.is_dir() else ""
    raise ModelNotFound(f"model {name!r} leads nowhere{hint}: {_EXPECTED}")


def open_directory(directory: Path, name: str = "") -> ModelFiles:
    """Read what a model's directory holds, without its weights.

    Raises:
        ModelNotFound: It holds no model.
        ModelLoadError: It cannot be read, or is incomplete.
    """
    try:
        config = _read_json(directory / "config.json")
        weights = _weight_files(directory)
    except FileNotFoundError as error:
        raise ModelNotFound(f"{directory} holds no {Path(error.filename).name}: {_EXPECTED}") from None
    except OSError as error:
        raise ModelLoadError(f"{directory} cannot be read: {error.strerror or error}") from error
    return ModelFiles(name or str(directory), directory, config, weights)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed: Any = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelLoadError(f"{path} is damaged: expected a JSON object ({error})") from error
    if not isinstance(parsed, dict):
        raise ModelLoadError(f"{path} is damaged: expected a JSON object and found {type(parsed).__name__}")
    return parsed  # pyright: ignore[reportUnknownVariableType]  # JSON is what it is


def _weight_files(directory: Path) -> tuple[Path, ...]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        named = {directory / file for file in _read_json(index).get("weight_map", {}).values()}
    else:
        named = set(directory.glob("*.safetensors"))
    missing = sorted(path.name for path in named if not path.is_file())
    if missing:
        raise ModelLoadError(f"{directory} is incomplete: {', '.join(missing)} named in {index.name}, not there")
    if not named:
        _explain_no_weights(directory)
    return tuple(sorted(named))


def _explain_no_weights(directory: Path) -> None:
    if list(directory.glob("*.bin")) or list(directory.glob("*.pt")):
        raise ModelLoadError(
            f"{directory} holds pickled weights, which aexec does not open: save it again with "
            "model.save_pretrained(directory), which writes safetensors"
        )
    raise ModelNotFound(f"{directory} holds no *.safetensors: {_EXPECTED}")
