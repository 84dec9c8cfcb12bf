"""A model name can hold the dummy's settings."""

from __future__ import annotations

import pytest

from aexec.errors import ConfigError
from aexec.model.dummy.settings import DUMMY_EOS_TOKEN_ID, DummySettings, is_dummy


def test_a_bare_name_means_the_defaults() -> None:
    """``dummy`` has 512 tokens and ends with 256 when told to end at all."""
    assert DummySettings.parse("dummy") == DummySettings()
    assert (DummySettings().vocab_size, DummySettings().eos_token_id) == (512, DUMMY_EOS_TOKEN_ID)


def test_a_name_sets_fields() -> None:
    """Numbers get the type of their field."""
    settings = DummySettings.parse("dummy:vocab_size=64,forward_seconds=0.01,seed=-3")
    assert settings == DummySettings(vocab_size=64, forward_seconds=0.01, seed=-3)


@pytest.mark.parametrize(
    ("name", "expected"), [("dummy", True), ("dummy:seed=1", True), ("dummy2", False), ("/dummy", False)]
)
def test_only_the_dummys_names_are_its_own(name: str, expected: bool) -> None:
    """A directory that is called alike is not it."""
    assert is_dummy(name) is expected


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("smollm2", "the model is 'smollm2': expected \"dummy\""),
        ("dummy:speed=3", "the dummy has no setting 'speed'; it has seed, vocab_size"),
        ("dummy:seed=x", "the dummy's seed is 'x': expected int"),
        ("dummy:seed", "the dummy's seed is '': expected int"),
        ("dummy:vocab_size=1", "the dummy's vocab_size is 1: expected at least 2"),
        ("dummy:max_model_len=0", "the dummy's max_model_len is 0: expected at least 2"),
        ("dummy:eos_probability=1.5", r"the dummy's eos_probability is 1\.5: expected a probability"),
        ("dummy:forward_seconds=nan", "the dummy's forward_seconds is nan: expected seconds"),
        (
            "dummy:vocab_size=9,eos_probability=0.1",
            "the dummy's eos_token_id is 256: expected an id below vocab_size, 9",
        ),
    ],
)
def test_a_wrong_setting_is_refused(name: str, problem: str) -> None:
    """The error names the setting, its value and what was expected."""
    with pytest.raises(ConfigError, match=problem):
        DummySettings.parse(name)
