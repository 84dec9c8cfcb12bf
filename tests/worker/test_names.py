from __future__ import annotations

import functools
import json

import pytest

from aexec.errors import ConfigError
from aexec.worker.names import load, name_of


def test_a_name_leads_to_its_object():
    """Dots after the colon go into the object."""
    assert load("json:JSONDecoder.decode", "here") is json.JSONDecoder.decode


@pytest.mark.parametrize("name", ["json.JSONDecoder", "json:", ":JSONDecoder", ""])
def test_a_name_has_the_form_module_colon_attribute(name):
    """The error says where it was given and what the form is."""
    with pytest.raises(ConfigError, match=r"worker_cls is .*expected the form 'package.module:name'"):
        load(name, "worker_cls")


def test_a_missing_module_is_named():
    """Also when it is a parent that is missing."""
    with pytest.raises(ConfigError, match="no module 'no_such_package'"):
        load("no_such_package.workers:Worker", "worker_cls")


def test_a_missing_attribute_is_named_with_its_likely_spelling():
    """A typing error is met with a suggestion."""
    with pytest.raises(ConfigError, match=r"json has no 'JSONDecodr'; did you mean 'JSONDecode"):
        load("json:JSONDecodr", "worker_cls")


def test_a_module_that_misses_another_one_is_not_called_missing(tmp_path, monkeypatch):
    """Its own failing import comes through as it is."""
    (tmp_path / "aexec_broken_module.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        load("aexec_broken_module:Worker", "worker_cls")


def test_any_callable_has_a_name():
    """Functions, classes and partials can be named in a message."""
    assert name_of(json.loads) == "loads"
    assert name_of(json.JSONDecoder) == "JSONDecoder"
    assert name_of(functools.partial(json.loads, "1")) == "partial"


def test_a_name_in_the_program_is_refused():
    """No worker process runs the program: it says what to give in its place."""
    with pytest.raises(ConfigError, match=r"'__main__:Mine'.* give Mine itself"):
        load("__main__:Mine", "worker_cls")
