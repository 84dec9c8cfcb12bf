"""GGUF files, converted once to safetensors and kept in the user's cache directory.

A conversion is named after the contents of the GGUF file, so that the same model in two
places is converted once and a changed file anew. It is written to a directory of its own
and renamed when complete: two processes may convert the same file at once, the first to
finish wins, and what a reader finds is always whole.
"""

from __future__ import annotations

import hashlib
import importlib
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from aexec.environ import CACHE_DIR
from aexec.errors import MissingExtra, ModelLoadError, OutOfMemory
from aexec.model.base import LoadProgress
from aexec.model.memory import free_host_bytes

__all__ = ("converted",)

_FORMAT = "1"  # of the conversion; another number converts all again
_STALE_AFTER = 3600.0  # seconds after which an unfinished conversion is somebody's leftover


def converted(source: Path, *, progress: LoadProgress | None = None, cache_dir: Path | None = None) -> Path:
    """The directory that holds ``source`` as safetensors; converts when it is not there yet.

    Raises:
        ModelLoadError: ``source`` is no GGUF file, is damaged, or the cache cannot be written.
        MissingExtra: The conversion needs libraries that are not installed.
        OutOfMemory: There is not enough memory to convert it.
    """
    name = _conversion_name(source)
    home = (cache_dir or CACHE_DIR.read()) / "models"
    target = home / name
    if target.is_dir():
        return target
    try:
        home.mkdir(parents=True, exist_ok=True)
        _sweep(home)
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=home))
    except OSError as error:
        raise ModelLoadError(f"{home} cannot be written ({error.strerror}): set {CACHE_DIR.name} elsewhere") from error
    try:
        _convert(source, draft, progress)
        _publish(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _conversion_name(source: Path) -> str:
    with source.open("rb") as stream:
        magic = stream.read(4)
        if magic != b"GGUF":
            raise ModelLoadError(f"{source} is no GGUF file: it begins with {magic!r}, expected b'GGUF'")
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=8))
    return f"{source.stem}-{digest.hexdigest()}-v{_FORMAT}"


def _convert(source: Path, draft: Path, progress: LoadProgress | None) -> None:
    try:
        importlib.import_module("accelerate")  # transformers would ask for it in words of its own
        gguf: Any = importlib.import_module("gguf")
        from aexec.model.transformer.hooks import convert_gguf, silent
    except ModuleNotFoundError as error:
        raise MissingExtra("reading a GGUF file", "models", error.name or "") from error
    try:
        num_elements = sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(source).tensors)
        _check_room(source, draft, 4 * num_elements)
        with silent(progress, "convert"):
            convert_gguf(source, draft)
    except (MemoryError, ModelLoadError):
        raise
    except Exception as error:  # the border to transformers and gguf, which raise whatever they meet
        raise ModelLoadError(f"{source} could not be converted: {type(error).__name__}: {error}") from error


def _check_room(source: Path, draft: Path, num_bytes: int) -> None:
    """Before anything is read: the weights in float32 and half as much again in memory, and once on disk."""
    need, have = num_bytes * 3 // 2, free_host_bytes()
    if need > have:
        raise OutOfMemory(f"converting {source.name}", need, have, "free memory, or convert it on a larger machine")
    free = shutil.disk_usage(draft).free
    if num_bytes > free:
        raise ModelLoadError(
            f"converting {source} writes {num_bytes / 2**20:,.1f} MiB to {draft.parent}, where {free / 2**20:,.1f} MiB "
            f"are free: set {CACHE_DIR.name} elsewhere"
        )


def _publish(draft: Path, target: Path) -> None:
    try:
        draft.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was faster, and its conversion is as good
            raise
    target.chmod(0o755)


def _sweep(home: Path) -> None:
    """Remove what killed conversions left behind."""
    for draft in home.glob(".draft-*"):
        try:
            is_stale = time.time() - draft.stat().st_mtime > _STALE_AFTER
        except FileNotFoundError:
            continue
        if is_stale:
            shutil.rmtree(draft, ignore_errors=True)
