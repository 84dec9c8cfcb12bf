from __future__ import annotations

import pickle

import pytest

from aexec.errors import WeightsMismatch
from aexec.model.update import Inventory, WeightUpdate

#: The second of two stages: the head is tied to the embedding, which this stage holds as well.
INVENTORY = Inventory(
    shapes={"embed": (8, 4), "first": (4, 4), "second": (4, 4), "head": (8, 4)},
    own=frozenset({"embed", "second", "head"}),
    twins={"embed": frozenset({"head"}), "head": frozenset({"embed"})},
)


def test_a_tied_tensor_fills_all_its_names() -> None:
    """Under whichever of them it comes."""
    for name in ("embed", "head"):
        update = WeightUpdate(INVENTORY)
        assert update.take(name) == ["embed", "head"]
        assert update.missing() == ["second"]


def test_weights_of_other_stages_are_passed_over() -> None:
    """They are counted, and neither applied nor missing."""
    update = WeightUpdate(INVENTORY)
    assert update.take("first") == []
    assert (update.applied, update.elsewhere, update.is_untouched) == ((), 1, True)
    assert update.missing() == ["embed", "head", "second"]


def test_names_that_came_twice_count_once() -> None:
    """In the order in which they came first."""
    update = WeightUpdate(INVENTORY)
    for name in ("second", "embed", "second"):
        update.take(name)
    assert update.applied == ("second", "embed")


def test_all_that_is_wrong_is_named_at_once() -> None:
    """Unknown names and wrong shapes together; the error pickles."""
    with pytest.raises(WeightsMismatch) as caught:
        WeightUpdate(INVENTORY).check([("third", (1,)), ("second", (4, 5)), ("first", (4, 4))], "nothing was applied")
    assert str(caught.value) == (
        "the model has no weight named third; wrong shapes: second is [4, 5], expected [4, 4]; nothing was applied"
    )
    assert caught.value.unknown == ("third",)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_long_list_of_names_is_cut() -> None:
    """The text shows five, the attribute has all."""
    error = WeightsMismatch(missing=[f"layer.{number}" for number in range(9)])
    assert str(error) == "still missing: layer.0, layer.1, layer.2, layer.3, layer.4 and 4 more"
    assert len(error.missing) == 9


def test_names_that_are_none_are_listed_like_others() -> None:
    """Whatever came as a name, the error can be printed."""
    assert str(WeightsMismatch(unknown=[7])) == "the model has no weight named 7"  # type: ignore[list-item]
