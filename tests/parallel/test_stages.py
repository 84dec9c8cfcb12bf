from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aexec.config import ParallelConfig
from aexec.errors import ConfigError
from aexec.parallel.stages import EndCosts, balanced_partition, checked_partition, layers_of_stage

costs = st.floats(min_value=0, max_value=40, allow_nan=False)


@given(st.integers(1, 40), st.integers(1, 8), costs, costs)
def test_every_layer_has_one_owner_and_every_stage_a_layer(spare, size, first, last):
    """Whatever the ends cost, the stages cover the model in order."""
    num_layers = size - 1 + spare
    partition = balanced_partition(num_layers, size, EndCosts(first, last))
    owned = [layer for stage in range(size) for layer in layers_of_stage(partition, stage)]
    assert owned == list(range(num_layers))
    assert min(partition) >= 1


@given(st.integers(1, 12), st.integers(1, 4), costs, costs)
def test_no_other_split_has_a_cheaper_dearest_stage(spare, size, first, last):
    """A pipeline is as fast as its slowest stage, so that one is what counts."""
    num_layers = size - 1 + spare

    def dearest(counts):
        extra = [0.0] * size
        extra[0] += first
        extra[-1] += last
        return max(count + more for count, more in zip(counts, extra, strict=True))

    def splits(left, stages):
        if stages == 1:
            yield (left,)
            return
        for count in range(1, left - stages + 2):
            for rest in splits(left - count, stages - 1):
                yield (count, *rest)

    best = min(dearest(counts) for counts in splits(num_layers, size))
    assert dearest(balanced_partition(num_layers, size, EndCosts(first, last))) == pytest.approx(best)


@pytest.mark.parametrize(
    ("num_layers", "partition"), [(8, (2, 2, 2, 2)), (9, (2, 2, 3, 2)), (10, (2, 3, 3, 2)), (11, (3, 3, 3, 2))]
)
def test_spare_layers_go_to_the_last_stage_but_one_and_backwards(num_layers, partition):
    """PP-06: the last stage has the head to do already."""
    assert balanced_partition(num_layers, 4) == partition


def test_a_large_vocabulary_takes_layers_off_both_ends():
    """SmolLM2 has 30 layers and a table of eight layers' size, which is embedding and head in one."""
    assert balanced_partition(30, 2, EndCosts.of(28_311_552, 28_311_552, 3_540_096)) == (17, 13)


def test_more_stages_than_layers_are_refused():
    """The error names both numbers."""
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 5: expected at most 4, the layers of the model"):
        balanced_partition(4, 5)


def test_a_partition_of_another_model_is_refused():
    """A partition that is asked for has to add up to the model's layers."""
    assert checked_partition([3, 1], 4) == (3, 1)
    with pytest.raises(ConfigError, match=r"is \(3, 2\) and adds up to 5: expected 4"):
        checked_partition((3, 2), 4)


@pytest.mark.parametrize("partition", [(4,), (2, 1, 1), (4, 0)])
def test_a_partition_of_another_number_of_stages_is_refused_at_once(partition):
    """Before any worker is started: each stage takes at least one layer."""
    with pytest.raises(ConfigError, match="expected 2 numbers of layers, one for each stage"):
        ParallelConfig(pipeline_parallel_size=2, pipeline_partition=partition)
