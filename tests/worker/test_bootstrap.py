from __future__ import annotations

import pytest

from aexec.messages.process import Launch
from aexec.worker.bootstrap import environment, title


def launch(**facts):
    usual = {"rank": 0, "local_world_size": 2, "driver_pid": 1, "context": b"", "arena_bytes": 1 << 20}
    return Launch(**usual | facts)


@pytest.mark.parametrize(
    ("here", "facts", "changes"),
    [
        ({}, {}, {"OMP_NUM_THREADS": "4"}),
        ({}, {"local_world_size": 16}, {"OMP_NUM_THREADS": "1"}),
        ({}, {"cpus": (0, 1)}, {"OMP_NUM_THREADS": "1"}),
        ({"OMP_NUM_THREADS": "7"}, {}, {}),
        ({}, {"env": {"OMP_NUM_THREADS": "3", "A": None}}, {"OMP_NUM_THREADS": "3", "A": None}),
    ],
)
def test_the_number_of_threads_is_a_default(here, facts, changes):
    """PRC-18: processors by workers of the node, unless somebody has said otherwise."""
    assert environment(here, launch(**facts), cpus=8) == changes


@pytest.mark.parametrize(("rank", "name"), [(2, "aexec:worker 2"), (10, "aexec:worker 10"), (1024, "aexec:1024")])
def test_a_title_fits_into_what_the_kernel_keeps(rank, name):
    """PRC-17: fifteen characters, the rank whole."""
    assert title(rank) == name
    assert len(name) <= 15
