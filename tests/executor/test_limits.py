from __future__ import annotations

import pytest

from aexec import ExecutorConfig
from aexec.errors import CallTimeout, ConfigError
from aexec.executor.limits import check_arguments, check_method, check_ranks, check_timeout


@pytest.mark.parametrize("timeout", [0, 0.0, -1.0])
def test_a_limit_of_nothing_is_past_already(timeout):
    """G04: it fails at once, and never means "no limit"."""
    with pytest.raises(CallTimeout, match="echo passed its limit of 0 s") as caught:
        check_timeout("echo", timeout)
    assert not caught.value.started


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), "1", True])
def test_a_limit_is_a_finite_number(timeout):
    """G04: what is not one is refused, and the error names the value."""
    with pytest.raises(ConfigError, match=r"timeout of echo is .*: expected a finite number of seconds, or None"):
        check_timeout("echo", timeout)


def test_only_none_means_no_limit():
    """In words."""
    assert check_timeout("echo", None) is None
    assert check_timeout("echo", 2) == 2.0


def test_ranks_come_in_rank_order():
    """None means all."""
    assert check_ranks(None, 3) == (0, 1, 2)
    assert check_ranks([2, 0], 3) == (0, 2)


@pytest.mark.parametrize("ranks", [[], [3], [-1], [0, 0], 0, "0", ["0"]])
def test_ranks_exist_and_are_named_once(ranks):
    """The error shows the ranks there are."""
    with pytest.raises(ConfigError, match="expected distinct ranks from 0 to 2"):
        check_ranks(ranks, 3)


@pytest.mark.parametrize("args", [4, "ab", b"ab", None])
def test_arguments_are_a_sequence_of_them(args):
    """A text is one argument, not one for each letter; the error shows how to say so."""
    with pytest.raises(ConfigError, match=r"args of add is .*: expected a tuple; for one argument, args=\("):
        check_arguments("add", args, None)
    assert check_arguments("add", [1, 2], {"by": 3}) == ((1, 2), {"by": 3})
    assert check_arguments("add", (), None) == ((), {})


def test_a_method_is_a_name_or_can_be_called():
    """What is neither is refused where the call is made."""
    assert (check_method("echo"), check_method(str.upper)) == ("echo", "str.upper")
    with pytest.raises(ConfigError, match="method is 3: expected a method's name, or a function"):
        check_method(3)


def test_named_arguments_are_a_mapping():
    """And what else was given is shown."""
    with pytest.raises(ConfigError, match=r"kwargs of add is \[1\]: expected a dict"):
        check_arguments("add", (), [1])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"worker_kwargs": [1]}, r"ExecutorConfig.worker_kwargs is \[1\]: expected a dict"),
        ({"env": ["A=1"]}, r"ExecutorConfig.env is \['A=1'\]: expected a dict"),
        ({"worker_init": "m:set_up"}, r"ExecutorConfig.worker_init is 'm:set_up': expected a list of functions"),
        ({"worker_extension": "m:Extra"}, r"ExecutorConfig.worker_extension is 'm:Extra': expected a list of classes"),
        ({"env": {"A": "1", "B": 2}}, r"ExecutorConfig.env\['B'\] is 2: expected text for name and value"),
    ],
)
def test_settings_of_the_wrong_kind_are_refused(settings, words):
    """Before anything is started; of the variables only the wrong one is shown."""
    with pytest.raises(ConfigError, match=words):
        ExecutorConfig(**settings)
