from __future__ import annotations

import pytest

from aexec.cli.options import SamplingOptions
from aexec.errors import InvalidRequest


def test_the_default_is_greedy() -> None:
    """The same command prints the same text."""
    assert SamplingOptions().params().is_greedy


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"max_tokens": 0}, {"top_p": 2.0}]
)
def test_a_value_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    """The request's own checks hold for the command line too."""
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        SamplingOptions(**wrong).params()
