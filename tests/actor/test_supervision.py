from __future__ import annotations

import pytest
import tenacity

from aexec.actor.supervision import (
    UNSUPERVISED,
    Backoff,
    Budget,
    Directive,
    Supervision,
    Trouble,
    affected,
    choose,
    delay_before,
)
from aexec.errors import ConfigError

ERROR = ValueError("broken")


def test_a_decision_goes_before_the_declaration_and_that_before_the_default():
    """What on_child_failed says counts; else the declared directive; else the table."""
    declared = Supervision(directive=Directive.STOP)
    for trouble in Trouble:
        assert choose(trouble, Directive.ESCALATE, declared) is Directive.ESCALATE
        assert choose(trouble, None, declared) is Directive.STOP
        assert choose(trouble, None, None) is UNSUPERVISED[trouble]


def test_what_did_not_start_cannot_resume():
    """There is nothing to go on with, so that it ends."""
    assert choose(Trouble.START, Directive.RESUME, Supervision()) is Directive.STOP


@pytest.mark.parametrize(
    ("strategy", "expected"), [("one_for_one", "b"), ("rest_for_one", "bc"), ("one_for_all", "abc")]
)
def test_a_strategy_names_who_is_affected(strategy, expected):
    """The failed one, those spawned after it, or all."""
    assert affected(strategy, list("abc"), "b") == list(expected)


def test_who_is_not_in_the_group_is_alone():
    """A strategy reaches nobody from outside of the group."""
    assert affected("one_for_all", list("abc"), "d") == ["d"]


def test_back_off_doubles_up_to_its_maximum():
    """The random part comes from the given source, and on top."""
    backoff = Backoff(0.5, 3.0, 0.25, random=lambda: 1.0)
    assert [delay_before(backoff, attempt, ERROR) for attempt in range(1, 6)] == [0.75, 1.25, 2.25, 3.25, 3.25]


def test_any_wait_strategy_of_tenacity_will_do():
    """They add up, and see the failure."""
    wait = Backoff(1.0, 1.0, 0.0) + tenacity.wait_fixed(2)
    assert delay_before(wait, 1, ERROR) == 3.0
    by_error = tenacity.wait_exception(lambda error: 7.0 if error is ERROR else 0.0)
    assert delay_before(by_error, 1, ERROR) == 7.0
    assert delay_before(lambda state: -1.0, 1, ERROR) == 0.0
    with pytest.raises(ValueError, match="gives inf seconds: expected a finite number"):
        delay_before(lambda state: float("inf"), 1, ERROR)


def test_restarts_come_back_with_time():
    """The window slides: what was spent longer ago than it counts no more."""
    budget, supervision = Budget(), Supervision(max_restarts=2, within=10.0)
    assert [budget.spend(now, supervision) for now in (0.0, 5.0, 9.0, 10.5, 16.0)] == [1, 2, None, 2, 2]
    assert repr(budget) == "<Budget: 2 spent>"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"strategy": "all"}, "strategy is 'all': expected one of one_for_one, one_for_all, rest_for_one"),
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"within": 0.0}, "within 0.0"),
        ({"backoff": 1.0}, r"backoff is 1\.0: expected Backoff\(\.\.\.\), or another"),
        ({"directive": "restart"}, "directive is 'restart': expected a Directive, as Directive.RESTART"),
        ({"exhausted": Directive.RESTART}, "expected Directive.STOP or Directive.ESCALATE"),
    ],
)
def test_a_supervision_that_means_nothing_is_refused(settings, text):
    """The text names the value and what was expected."""
    with pytest.raises(ConfigError, match=text):
        Supervision(**settings)


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_a_back_off_that_means_nothing_is_refused(seconds):
    """Seconds are finite and not negative."""
    with pytest.raises(ConfigError, match="expected seconds, 0 or more"):
        Backoff(seconds)
