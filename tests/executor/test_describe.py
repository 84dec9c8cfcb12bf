from __future__ import annotations

import pytest

from aexec import ExecutorConfig, ParallelConfig, environ
from aexec.executor.describe import HIDDEN, describe, hide


def test_each_setting_says_where_it_came_from(monkeypatch):
    """G46: given, default, chosen, or from a variable."""
    monkeypatch.setenv(environ.LOG_LEVEL.name, "error")
    monkeypatch.delenv(environ.LOG_FORMAT.name, raising=False)
    config = ExecutorConfig(parallel=ParallelConfig(tensor_parallel_size=2), rpc_timeout=3.0)
    told = describe(config, {"backend": "mp", "rpc_timeout": 99.0}, {})
    assert told["rpc_timeout"][1:] == (3.0, "argument")
    assert told["slow_call"][1:] == (10.0, "default")
    assert told["backend"][1:] == ("mp", "chosen")
    assert told["parallel.tensor_parallel_size"][1:] == (2, "argument")
    assert told["parallel.pipeline_parallel_size"][1:] == (1, "default")
    assert told["AEXEC_LOG_LEVEL"][1:] == ("error", "environment")
    assert told["AEXEC_LOG_FORMAT"][1:] == ("auto", "default")
    with pytest.raises(KeyError, match="no_such"):
        told["no_such"]


def test_secrets_are_hidden():
    """G39: by the looks of the name, or of the value."""
    secret = {"HF_TOKEN": "x", "db_password": "y", "API_KEY": "z", "URL": "http://me:pw@host", "A": "hf_abcdefghijkl"}
    assert set(hide(secret).values()) == {HIDDEN}
    assert hide({"KEYBOARD": "de", "N": 3}) == {"KEYBOARD": "de", "N": 3}
    config = ExecutorConfig(worker_kwargs={"auth": "s3cret", "size": 1})
    text = str(describe(config, {}, {"HF_TOKEN": "s3cret", "B": "1"}))
    assert "s3cret" not in text
    assert "HF_TOKEN=(hidden)" in text
    assert "'size': 1" in text


def test_a_description_is_a_table():
    """One line for a setting, and the variables below."""
    text = str(describe(ExecutorConfig(step_timeout=7.0), {}, {}))
    (line,) = [line for line in text.splitlines() if line.startswith("step_timeout")]
    assert line.split() == ["step_timeout", "7.0", "(argument)"]
    assert text.endswith("sent to the workers:\n  nothing")


def test_the_settings_of_one_backend_come_after_those_of_all():
    """The page begins with the backend, and not with what only Ray reads."""
    names = [setting.name for setting in describe(ExecutorConfig(), {}, {}).settings]
    assert names[0] == "backend"
    assert names.index("on_failure") < names.index("ray_address") < names.index("graph_idle_release")
