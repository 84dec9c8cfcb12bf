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

from aexec.environ import CACHE_DIR
from aexec.errors import MissingExtra, ModelLoadError
from aexec.model.base import LoadProgress

__all__ = ("converted",)

_FORMAT = "1"  # of the conversion; another number converts all again
_STALE_AFTER = 3600.0  # seconds after which an unfinished conversion is somebody's leftover


def converted(source: Path, *, progress: LoadProgress | None = None, cache_dir: Path | None = None) -> Path:
    """The directory that holds ``source`` as safetensors; converts when it is not there yet.

    Raises:
        ModelLoadError: ``source`` is no GGUF file, is damaged, or the cache cannot be written.
        MissingExtra: The conversion needs libraries that are not installed.
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
        for library in ("accelerate", "gguf"):  # transformers would name them in words of its own
            importlib.import_module(library)
        from aexec.model.hooks import convert_gguf, silent
    except ModuleNotFoundError as error:
        raise MissingExtra("reading a GGUF file", "models", error.name or "") from error
    try:
        with silent(progress, "convert"):
            convert_gguf(source, draft)
    except (MemoryError, ModelLoadError):
        raise
    except Exception as error:  # the border to transformers and gguf, which raise whatever they meet
        raise ModelLoadError(f"{source} could not be converted: {type(error).__name__}: {error}") from error


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
