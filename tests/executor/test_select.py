from __future__ import annotations

import pytest

from aexec.config import ExecutorConfig, ModelConfig, ParallelConfig
from aexec.errors import ConfigError
from aexec.executor.select import select_backend

KNOWN = ("uni", "mp", "ray")


def select(backend=None, ranks=1, devices=0, has_ray=True, **settings):
    config = ExecutorConfig(backend=backend, parallel=ParallelConfig(ranks), **settings)
    return select_backend(config, KNOWN, devices=devices, has_ray=has_ray)


def test_one_rank_stays_in_this_process():
    """SEL-04: nothing was asked for, so the cheapest."""
    assert select() == "uni"
    assert select(devices=1) == "uni"


def test_what_is_named_is_taken():
    """G42: never silently another."""
    assert select("uni", ranks=4) == "uni"
    assert select("mp", ranks=4, devices=1) == "mp"
    assert select("my_package.backends:Mine") == "my_package.backends:Mine"


def test_several_ranks_take_processes():
    """SEL-03: one process for each, on CPUs as many as there are ranks, on devices one each."""
    assert select(ranks=2) == "mp"
    assert select(ranks=2, devices=2) == "mp"


def test_more_ranks_than_devices_take_ray():
    """SEL rows: this machine cannot hold them, a cluster may; ranks that take no device are not counted."""
    assert select(ranks=2, devices=1) == "ray"
    for model in (ModelConfig(model="dummy"), ModelConfig(model="smollm2", device="cpu")):
        assert select(ranks=2, devices=1, worker_kwargs={"model_config": model}) == "mp"


@pytest.mark.parametrize("setting", [{"placement_group": "mine"}, {"ray_address": "head:6379"}])
def test_settings_of_ray_take_ray(setting):
    """SEL rows: a given placement group means that workers go there, one alone as well."""
    assert select(**setting) == "ray"


def test_ray_that_is_not_installed_names_the_extra():
    """With the other way out, and before anything is started."""
    with pytest.raises(ConfigError, match=r"2 ranks, and this machine has 1 device: .*'aexec\[ray\]'; or take fewer"):
        select(ranks=2, devices=1, has_ray=False)
    with pytest.raises(ConfigError, match=r"placement_group is given, .*'aexec\[ray\]'; or leave it out"):
        select(placement_group="mine", has_ray=False)


def test_an_unknown_name_lists_the_known_ones():
    """SEL-01: a slip of the pen is no import path."""
    with pytest.raises(ConfigError, match=r"backend is 'Uni': expected 'mp', 'ray', 'uni'.*did you mean 'uni'"):
        select("Uni")
    with pytest.raises(ConfigError, match="backend is 3"):
        select(3)
