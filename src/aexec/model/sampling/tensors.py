"""From tensors to Python's own numbers, with types that a checker can follow."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

__all__ = ("to_list",)


def to_list(tensor: Tensor) -> list[Any]:
    """The numbers of a tensor on any device, nested as its shape is; waits for the device."""
    numbers: list[Any] = np.asarray(tensor.cpu()).tolist()
    return numbers
