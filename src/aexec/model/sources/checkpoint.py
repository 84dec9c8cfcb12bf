"""What a safetensors checkpoint holds, read from its headers alone: names, shapes, bytes.

Source: the format of safetensors 0.8: eight bytes, little-endian, give the length of a JSON
header; ``data_offsets`` count from its end.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aexec.errors import ModelLoadError
from aexec.parallel.stages import EndCosts

__all__ = ("TensorEntry", "end_costs", "num_elements", "read_headers")

_MAX_HEADER = 100 * 2**20
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint.

    Attributes:
        name: Its name in the file.
        dtype: As in ``F32``.
        shape: Its dimensions.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Product of the dimensions."""
        return math.prod(self.shape)

    @property
    def layer(self) -> int | None:
        """Index of the layer that it belongs to; None for embeddings, heads and the last norm."""
        found = _LAYER.search(self.name)
        return int(found[1]) if found else None


def read_headers(files: Iterable[Path]) -> list[TensorEntry]:
    """All tensors of a checkpoint.

    Raises:
        ModelLoadError: A file is no safetensors file, or is cut short.
    """
    return [entry for file in files for entry in _read_header(file)]


def num_elements(entries: Iterable[TensorEntry], layers: range | None = None) -> int:
    """Elements of the tensors that a stage with these layers holds; None: of all.

    Tensors outside of layers count for each stage, so that the estimate errs upwards.
    """
    return sum(
        entry.num_elements for entry in entries if layers is None or entry.layer is None or entry.layer in layers
    )


def end_costs(entries: Iterable[TensorEntry]) -> EndCosts:
    """What embedding and head of a checkpoint cost beside its layers; both are as large as the table of tokens."""
    sizes: dict[int | None, list[int]] = {}
    for entry in entries:
        sizes.setdefault(entry.layer, []).append(entry.num_elements)
    table = max(sizes.pop(None, [0]))
    layer = sum(map(sum, sizes.values())) / max(1, len(sizes))
    return EndCosts.of(table, table, layer)


def _read_header(file: Path) -> list[TensorEntry]:
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if not 0 < size <= _MAX_HEADER:
            raise ModelLoadError(f"{file} is no safetensors file: its header would take {size} bytes")
        raw = stream.read(size)
    try:
        header: dict[str, Any] = json.loads(raw)
        header.pop("__metadata__", None)
        entries = [TensorEntry(name, facts["dtype"], tuple(facts["shape"])) for name, facts in header.items()]
        end = max((facts["data_offsets"][1] for facts in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{file} is damaged: its header cannot be read ({error!r})") from error
    have, need = file.stat().st_size, 8 + size + end
    if have < need:
        raise ModelLoadError(f"{file} is cut short: it has {have:,} bytes and its header speaks of {need:,}")
    return entries
