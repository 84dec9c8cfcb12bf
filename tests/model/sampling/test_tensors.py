"""Numbers leave the device as Python's own."""

from __future__ import annotations

import torch

from aexec.model.sampling.tensors import to_list


def test_lists_are_nested_as_the_tensor_is() -> None:
    """Integers stay integers, floats stay floats, and an empty tensor is an empty list."""
    assert to_list(torch.tensor([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
    assert [type(number) for number in to_list(torch.tensor([1.5]))] == [float]
    assert to_list(torch.empty(0)) == []
