"""Settings of another type than the one that is expected."""

from __future__ import annotations

import numpy as np
import pytest

from aexec import ConfigError, ExecutorConfig, ParallelConfig, Restart
from aexec.config import CacheConfig, ModelConfig, SchedulerConfig


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (
            ParallelConfig,
            {"tensor_parallel_size": "2"},
            "tensor_parallel_size is '2': expected an integer of at least 1",
        ),
        (ParallelConfig, {"tensor_parallel_size": 2.0}, "tensor_parallel_size is 2.0: expected an integer"),
        (ParallelConfig, {"pipeline_parallel_size": True}, "pipeline_parallel_size is True: expected an integer"),
        (CacheConfig, {"num_blocks": 2.5}, "num_blocks is 2.5: expected an integer of at least 2"),
        (CacheConfig, {"connector": "x"}, r"connector .* is 'x': expected settings such as Offload\(\.\.\.\)"),
        (SchedulerConfig, {"max_num_seqs": "3"}, "max_num_seqs is '3': expected an integer of at least 1"),
        (SchedulerConfig, {"recovery_timeout": "x"}, "recovery_timeout is 'x': expected at least 0"),
        (ModelConfig, {"model": 5}, "ModelConfig.model is 5: expected a name, or a path as text"),
        (ExecutorConfig, {"arena_bytes": "1G"}, "arena_bytes is '1G': expected an integer of at least 65536"),
        (ExecutorConfig, {"arena_bytes": 0}, "arena_bytes is 0: expected at least 65536"),
        (ExecutorConfig, {"step_timeout": "1"}, "step_timeout is '1': expected a positive number of seconds"),
        (Restart, {"max_restarts": "3"}, "max_restarts is '3': expected an integer of at least 1"),
    ],
)
def test_a_setting_of_another_type_is_refused_by_name(make, given, message):
    """When it is made, and not by what would have used it."""
    with pytest.raises(ConfigError, match=message):
        make(**given)


def test_numbers_of_numpy_are_numbers():
    """Programs compute sizes with it."""
    assert ParallelConfig(tensor_parallel_size=np.int64(2)).world_size == 2
