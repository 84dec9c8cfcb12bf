"""How many blocks the KV cache gets, and what its memory looks like."""

from __future__ import annotations

import pytest
import torch

from aexec.config import CacheConfig
from aexec.errors import OutOfMemory
from aexec.model.transformer.kv_cache import KVCache, KVShape, blocks_for, budget_for

GIB = 2**30
CPU = torch.device("cpu")


def budget(
    config: CacheConfig, free: int = 8 * GIB, block: int = 2**20, length: int = 8192, *, cuda: bool = False
) -> int:
    return budget_for(config, free, block, length, is_cuda=cuda)


def test_the_default_on_a_cpu_is_a_quarter_of_what_is_free() -> None:
    """The rest of the machine keeps three quarters."""
    assert budget(CacheConfig(), 8 * GIB) == 2 * GIB


def test_the_default_on_a_cpu_has_a_ceiling() -> None:
    """On a machine with much memory it is 4 GiB."""
    assert budget(CacheConfig(), 512 * GIB) == 4 * GIB


def test_the_default_is_no_more_than_requests_could_fill() -> None:
    """A tiny model gets as many blocks as 256 requests of full length need, and the null block."""
    assert budget(CacheConfig(block_size=16), block=1000, length=100) == (1 + 256 * 7) * 1000


def test_cuda_gives_nearly_all_that_is_free() -> None:
    """Nine tenths; activations live in the rest."""
    assert budget(CacheConfig(), 10 * GIB, cuda=True) == 9 * GIB


def test_a_given_budget_is_taken_as_it_is() -> None:
    """The user's bytes, no share of anything."""
    assert budget(CacheConfig(memory_bytes=5 * GIB)) == 5 * GIB


def test_a_given_number_of_blocks_may_take_all_that_is_free() -> None:
    """The user's number is held against the memory, not against the default share."""
    config = CacheConfig(num_blocks=5000)
    assert blocks_for(config, budget(config), 2**20) == 5000


def test_without_a_number_the_bytes_decide() -> None:
    """As many whole blocks as they hold."""
    assert blocks_for(CacheConfig(), 1050, 100) == 10


@pytest.mark.parametrize(
    ("config", "have", "words"),
    [
        (CacheConfig(memory_bytes=9 * GIB), 8 * GIB, "CacheConfig.memory_bytes needs 9,216.0 MiB and 8,192.0 MiB"),
        (CacheConfig(num_blocks=9000), 8 * GIB, "a KV cache of 9000 blocks needs 9,000.0 MiB and 8,192.0 MiB"),
        (
            CacheConfig(memory_bytes=2**20),
            8 * GIB,
            "the least KV cache .2 blocks of 16 positions. needs 2.0 MiB and 1.0 MiB",
        ),
    ],
)
def test_a_cache_that_does_not_fit_says_what_it_needs_and_what_there_is(config, have, words) -> None:
    """Need and have in the same unit, and a remedy."""
    with pytest.raises(OutOfMemory, match=words) as caught:
        blocks_for(config, budget(config, have), 2**20)
    assert caught.value.remedy
    assert caught.value.need_bytes > caught.value.have_bytes


def test_layers_share_no_memory_and_count_what_they_take() -> None:
    """Each layer's keys and values are its own, of its own shape."""
    cache = KVCache({0: KVShape(2, 8), 3: KVShape(2, 8), 5: KVShape(1, 4)}, 6, 4, torch.float32, CPU)
    for layer in (0, 3, 5):
        cache.keys[layer].fill_(layer + 1)
        cache.values[layer].fill_(-layer - 1)
    assert [int(cache.keys[layer].unique()) for layer in (0, 3, 5)] == [1, 4, 6]
    assert [int(cache.values[layer].unique()) for layer in (0, 3, 5)] == [-1, -4, -6]
    assert cache.num_bytes == 6 * 4 * 2 * 4 * (2 * 8 + 2 * 8 + 4)
    assert repr(cache).startswith("<KVCache: 6 blocks of 4 positions, 3 layers")


def test_a_zeroed_block_holds_nothing_of_its_last_owner() -> None:
    """NaN among what attention masks would spread: zero times NaN is NaN."""
    cache = KVCache({0: KVShape(1, 2), 1: KVShape(1, 2)}, 4, 2, torch.bfloat16, CPU)
    for tensor in (*cache.keys.values(), *cache.values.values()):
        tensor.fill_(float("nan"))
    cache.zero(torch.tensor([1, 3]))
    for tensor in (*cache.keys.values(), *cache.values.values()):
        assert tensor[[1, 3]].eq(0).all()
        assert tensor[[0, 2]].isnan().all()


def test_bytes_per_position_count_key_and_value() -> None:
    """3 heads of 64 in float32: 1536 bytes."""
    assert KVShape(3, 64).bytes_per_position(torch.float32) == 1536
