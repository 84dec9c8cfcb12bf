"""Every weight of a whole model by name and shape, without reading or allocating any.

The model is built on the meta device from its configuration, whole, whatever part of it
this rank holds: so any rank knows the names of all others.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as _transformers

from aexec.model.transformer.hooks import silent
from aexec.model.update import Shape

__all__ = ("WholeModel", "describe_model")

transformers: Any = _transformers  # its annotations are partial


@dataclass(frozen=True, slots=True)
class WholeModel:
    """What a model is made of.

    Attributes:
        shapes: All weights of its ``state_dict()``.
        twins: For each tied weight, the others that are the same tensor.
        heads: Query heads, key/value heads and head size.
        max_positions: Tokens of prompt and output that it can hold.
    """

    shapes: dict[str, Shape]
    twins: dict[str, frozenset[str]]
    heads: tuple[object, ...]
    max_positions: int

    def difference(self, other: WholeModel) -> str:
        """Why ``other`` cannot take the place of this one, in words; empty if it can."""
        for name in sorted({*self.shapes, *other.shapes}):
            mine, its = self.shapes.get(name), other.shapes.get(name)
            if mine != its:
                return f"{name} is {_words(its)} there and {_words(mine)} here"
        if self.heads != other.heads:
            return f"its heads are {other.heads} and those here {self.heads}"
        if self.max_positions > other.max_positions:
            return f"it holds {other.max_positions} positions and the one here {self.max_positions}"
        return ""


def describe_model(directory: Path, class_name: str) -> WholeModel:
    """The model of a directory's ``config.json``."""
    with silent(), torch.device("meta"):
        config: Any = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        model: Any = getattr(transformers, class_name)(config)
    text = config.get_text_config()
    return WholeModel(
        shapes={name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
        twins=_twins(model),
        heads=tuple(getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")),
        max_positions=int(text.max_position_embeddings),
    )


def _twins(model: Any) -> dict[str, frozenset[str]]:
    names: defaultdict[int, set[str]] = defaultdict(set)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].add(name)
    for name, source in model.all_tied_weights_keys.items():
        group = names[id(model.get_parameter(source))]
        names[id(model.get_parameter(name))] = group
        group.add(name)
    return {name: frozenset(group - {name}) for group in names.values() for name in group if len(group) > 1}


def _words(shape: Shape | None) -> str:
    return "missing" if shape is None else str(list(shape))
