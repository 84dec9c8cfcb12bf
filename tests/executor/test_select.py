from __future__ import annotations

import pytest

from aexec.config import ExecutorConfig, ParallelConfig
from aexec.errors import ConfigError
from aexec.executor.select import select_backend

KNOWN = ("uni", "mp")


def select(backend=None, ranks=1):
    return select_backend(ExecutorConfig(backend=backend, parallel=ParallelConfig(ranks)), KNOWN)


def test_one_rank_stays_in_this_process():
    """SEL-04: nothing was asked for, so the cheapest."""
    assert select() == "uni"


def test_what_is_named_is_taken():
    """G42: never silently another."""
    assert select("uni", ranks=4) == "uni"
    assert select("my_package.backends:Mine") == "my_package.backends:Mine"


@pytest.mark.parametrize("name", ["ray", "external_launcher"])
def test_a_backend_that_is_not_there_yet_says_so(name):
    """With what to do instead."""
    with pytest.raises(ConfigError, match=rf"backend '{name}' .* is not part of this release: take backend='uni'"):
        select(name)


def test_several_ranks_take_processes():
    """SEL-03: one process for each; and a backend that is not there names that remedy."""
    assert select(ranks=2) == "mp"
    with pytest.raises(ConfigError, match="take backend='mp'"):
        select("ray", ranks=2)


def test_an_unknown_name_lists_the_known_ones():
    """SEL-01: a slip of the pen is no import path."""
    with pytest.raises(ConfigError, match=r"backend is 'Uni': expected 'mp', 'uni'.*did you mean 'uni'"):
        select("Uni")
    with pytest.raises(ConfigError, match="backend is 3"):
        select(3)
