from __future__ import annotations

import pickle
import threading

import pytest

from aexec.errors import ConfigError, ModelNotReady
from aexec.model.residency import TRANSITIONS, Residency, WeightsEvent, WeightsState, sleep_event, wake_tags

S, E = WeightsState, WeightsEvent


def moved(*events: WeightsEvent) -> Residency:
    residency = Residency()
    for event in events:
        residency.move(event)
    return residency


def test_every_state_has_a_way_back_to_ready() -> None:
    """Whatever happened, some sequence of events leads to weights that run."""
    for start in S:
        reached = {start}
        for _ in S:
            reached |= {after for state in reached for after in TRANSITIONS[state].values()}
        assert S.READY in reached


@pytest.mark.parametrize("state", [state for state in S if state is not S.READY])
def test_only_whole_weights_run(state) -> None:
    """In any other state the refusal names the state and what to do."""
    residency = Residency()
    residency.weights = state
    with pytest.raises(ModelNotReady, match=r"a forward pass was refused: the weights are .*; (call|send) ") as caught:
        residency.require_ready("a forward pass")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_what_cannot_happen_changes_nothing() -> None:
    """An update onto sleeping weights is refused, and they sleep on."""
    residency = moved(E.LOADED, E.SLEEP_1)
    with pytest.raises(ModelNotReady, match=r"an update of the weights was refused: .* call wake_up\(\['weights'\]\)"):
        residency.move(E.START)
    assert residency.weights is S.ASLEEP


def test_deep_sleep_is_not_undone_by_a_light_one() -> None:
    """Level 1 after level 2 does not bring the weights back, and neither does waking."""
    residency = moved(E.LOADED, E.SLEEP_2, E.SLEEP_1)
    assert residency.weights is S.DISCARDED
    residency.move(E.WAKE)
    assert residency.weights is S.MISSING


def test_versions_count_whole_weights() -> None:
    """Loading and finished updates; sleeping and waking leave the number as it is."""
    assert moved(E.LOADED).version == 1
    assert moved(E.LOADED, E.SLEEP_1, E.WAKE).version == 1
    assert moved(E.LOADED, E.START, E.FINISH, E.LOADED).version == 3


def test_a_sleeping_cache_is_told_from_one_that_was_never_made() -> None:
    """Only the first has to be woken."""
    residency = moved(E.LOADED)
    assert not residency.cache_sleeps
    residency.cache_dropped()
    assert not residency.cache_sleeps
    residency.cache_made()
    residency.cache_dropped()
    assert residency.cache_sleeps
    assert "asleep" in repr(residency)


@pytest.mark.parametrize("tags", ["cache", ["weights", "kv"], [], 5, ["kv", 5]])
def test_unknown_tags_are_refused(tags) -> None:
    """With those that there are."""
    with pytest.raises(ConfigError, match="expected any of weights, kv_cache, or None"):
        wake_tags(tags)


def test_one_tag_may_come_without_a_list() -> None:
    """A string is one tag, not its letters."""
    assert wake_tags("weights") == {"weights"}
    assert wake_tags(None) == {"weights", "kv_cache"}


@pytest.mark.parametrize("level", [0, 3, "1", None])
def test_unknown_levels_are_refused(level) -> None:
    """With what the levels mean."""
    with pytest.raises(ConfigError, match=rf"level of sleep is {level!r}: expected 1 \(weights are kept"):
        sleep_event(level)


def test_weights_stay_as_they_are_while_somebody_reads_them() -> None:
    """Whoever wants to change them waits, and from then on nobody reads on."""
    residency = moved(E.LOADED)
    began = residency.num_changes
    change = threading.Thread(target=residency.move, args=(E.START,))
    with residency.still(began):
        change.start()
        change.join(0.02)
        assert residency.weights is S.READY
    change.join(10)
    assert residency.weights is S.UPDATING
    with pytest.raises(ModelNotReady, match="changed meanwhile"), residency.still(began):
        raise AssertionError("it was read")
