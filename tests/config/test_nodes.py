from __future__ import annotations

import pickle

import pytest

from aexec import ExecutorConfig
from aexec.errors import ConfigError

REFUSED = [
    ({"nnodes": 0}, "nnodes is 0: expected at least 1"),
    ({"node_rank": 1}, "node_rank is 1 and nnodes is 1: nodes are counted from 0"),
    ({"nnodes": 2, "node_rank": -1}, "node_rank is -1: expected at least 0"),
    ({"master_addr": " "}, "master_addr is ' ': expected the leader's address or name"),
    ({"master_addr": "::"}, "master_addr is '::', which means every network of this machine"),
    ({"master_port": 65536}, "master_port is 65536: expected 0 to 65535"),
    ({"node_allow": "10.0.0.1"}, "node_allow is '10.0.0.1': expected a list of texts"),
    ({"node_allow": ["10.0.0.300"]}, "node_allow has '10.0.0.300': expected an address, or a network"),
    ({"node_timeout": 0.0}, "node_timeout is 0.0: expected a positive number of seconds"),
    ({"nnodes": 2, "ranks_per_node": "22"}, "ranks_per_node is '22': expected a positive number for each node"),
    ({"nnodes": 2, "ranks_per_node": [2, 0]}, r"ranks_per_node is \[2, 0\]: expected a positive number for each node"),
    ({"nnodes": 3, "ranks_per_node": [2, 2]}, "expected 3 numbers, one for each node"),
    ({"backend": "ray", "nnodes": 2}, "nnodes is 2 and backend is 'ray': that is a setting of backend='mp'"),
    ({"backend": "uni", "master_port": 1}, "master_port is 1 and backend is 'uni'"),
]


@pytest.mark.parametrize(("settings", "text"), REFUSED)
def test_what_no_set_of_nodes_could_be_is_refused(settings, text):
    """With the setting, its value, and what was expected."""
    with pytest.raises(ConfigError, match=text):
        ExecutorConfig(**settings)


def test_settings_of_nodes_travel_with_the_others():
    """MN-01: they are settings of an executor like any other, by the names that torchrun has for them."""
    config = ExecutorConfig(nnodes=2, master_addr="10.0.0.5", master_port=0, node_allow=["10.0.0.0/24", "fd00::7"])
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.node_settings() == ("nnodes", "master_addr", "master_port", "node_allow")
    assert ExecutorConfig().node_settings() == ()
    assert config.ray_settings() == ()
