"""What a request begins with: shared, loaded and new blocks."""

from __future__ import annotations

import pytest

from aexec.engine.allocation import KVAllocator
from aexec.engine.blocks import BlockPool
from aexec.engine.request import NEVER, Request
from aexec.engine.samples import samples_of
from aexec.messages.batch import KVConnectorOutput
from aexec.messages.request import SamplingParams


class Connector:
    """Has ``num_blocks`` of whatever it is asked for."""

    def __init__(self, num_blocks=0):
        self.num_blocks, self.planned, self.is_trusted, self.num_detached = num_blocks, [], True, 0

    def match(self, hashes):
        return min(self.num_blocks, len(hashes))

    def plan(self, evicted, loads):
        self.planned.append((list(evicted), list(loads)))

    def take_report(self, report):
        return self.is_trusted

    def detach(self, *, afresh=False):
        self.num_detached += 1

    def request_finished(self, request_id):
        """Nothing is kept by request."""


def make(name="a", num_tokens=10, **facts):
    sampling = facts.pop("sampling", SamplingParams(temperature=0.0))
    return Request(name, list(range(num_tokens)), num_tokens, sampling, frozenset(), 99, **facts)


def allocator(num_blocks=12, connector=None, **settings):
    return KVAllocator(BlockPool(num_blocks, 4), **({"prefix_caching": True, "connector": connector} | settings))


def run(kv, request, budget=99):
    """Admit a request and run it as far as the budget goes."""
    if request.caches_at == NEVER and not request.root_hash:
        kv.enroll(request)
    num_tokens = kv.begin(request, budget)
    computed = request.num_computed_tokens
    request.num_computed_tokens += num_tokens
    kv.cache(request)
    kv.blocks.check_integrity()
    return computed, num_tokens


@pytest.mark.parametrize(
    ("first", "second", "computed"),
    [
        (10, 10, 8),  # two full blocks
        (10, 8, 4),  # at least one token is computed
        (8, 9, 8),
        (10, 3, 0),
        (3, 10, 0),
    ],
)
def test_full_blocks_of_a_common_beginning_are_shared(first, second, computed):
    """And no more, so that there is something to sample from."""
    kv = allocator()
    assert run(kv, make("a", first)) == (0, first)
    assert run(kv, make("b", second)) == (computed, second - computed)
    assert list(kv.blocks.table("b"))[: computed // 4] == list(kv.blocks.table("a"))[: computed // 4]
    assert kv.statistics()[1:3] == (first + second, computed)


def test_only_what_has_been_scheduled_is_shared():
    """A prompt that is cut into chunks is shared as far as it came."""
    kv = allocator()
    request = make("a", 20)
    run(kv, request, budget=9)
    assert run(kv, make("b", 20))[0] == 8
    request.num_computed_tokens += 9
    kv.blocks.grow("a", 18)
    kv.cache(request)
    assert run(kv, make("c", 20))[0] == 16


def test_tokens_that_are_not_known_yet_are_not_shared():
    """Where steps overlap, more is scheduled than is known."""
    kv = allocator()
    request = make("a", 7)
    run(kv, request)
    kv.blocks.grow("a", 9)
    request.num_computed_tokens = 9
    kv.cache(request)
    assert (kv.blocks.num_cached, request.num_cached_blocks) == (1, 1)
    request.token_ids += [7, 8]
    kv.cache(request)
    assert run(kv, make("b", 9)) == (8, 1)


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({}, {"cache_salt": "x"}),
        ({"prefix_caching": False}, {}),
        ({}, {"sampling": SamplingParams(temperature=0.0, prompt_logprobs=0)}),
    ],
    ids=["other salt", "no cache", "prompt logprobs"],
)
def test_what_must_not_be_shared_is_computed(settings, facts):
    """Whatever lies in the cache."""
    kv = allocator(**settings)
    run(kv, make("a"))
    assert run(kv, make("b", **facts)) == (0, 10)


def test_samples_share_their_prompt_without_a_prefix_cache_and_nobody_else_does():
    """The next request with the same prompt computes it."""
    kv = allocator(prefix_caching=False, num_blocks=30)
    params = SamplingParams(n=3)
    groups = [samples_of(make(name, sampling=params, arrival=place)) for place, name in enumerate("ab")]
    for group in groups:
        for sample in group:
            kv.enroll(sample)
        assert [run(kv, sample)[0] for sample in group] == [0, 8, 8]


def test_a_request_that_does_not_fit_leaves_everything_as_it_was():
    """Shared blocks that nobody holds count as free, and are not free for two."""
    kv = allocator(num_blocks=6)
    run(kv, make("a", 12))
    kv.release(make("a", 12))
    held = make("held", 8, cache_salt="x")
    run(kv, held)
    big = make("b", 16)
    kv.enroll(big)
    assert kv.begin(big, 99) == 0
    assert (list(kv.blocks.table("b")), kv.blocks.num_free, kv.statistics().num_hit_tokens) == ([], 3, 0)
    kv.release(held)
    assert run(kv, big) == (12, 4)


def test_a_connector_brings_what_the_cache_lacks():
    """Its blocks are named with what they shall hold, and count as computed."""
    connector = Connector()
    kv = allocator(connector=connector)
    run(kv, make("a", 5))
    connector.num_blocks = 2
    request = make("b", 22)
    assert run(kv, request, budget=3) == (12, 3)
    kv.transfer()
    ((evicted, loads),) = connector.planned
    assert evicted == []
    assert loads == list(zip(kv.blocks.table("b")[1:3], request.block_hashes[1:3], strict=True))
    assert kv.statistics()[1:4] == (27, 4, 8)
    assert kv.transfer() is None
    assert connector.planned[1:] == [([], [])]


def test_a_connector_is_told_of_what_is_given_away():
    """Block and hash, once."""
    connector = Connector()
    kv = allocator(num_blocks=4, connector=connector)
    request = make("a", 12)
    run(kv, request)
    blocks = list(kv.blocks.table("a"))
    kv.release(request)
    run(kv, make("b", 10, cache_salt="x"))
    kv.transfer()
    (evicted, _) = connector.planned[-1]
    assert evicted == list(zip(reversed(blocks), reversed(request.block_hashes), strict=True))


@pytest.mark.parametrize("is_trusted", [True, False])
def test_blocks_that_could_not_be_loaded_void_those_who_hold_them_and_the_cache(is_trusted):
    """The others go on; where the ranks are not what they were, nothing that they hold is shared either."""
    connector = Connector(num_blocks=1)
    kv = allocator(connector=connector)
    connector.is_trusted = is_trusted
    good, bad = make("good", 3), make("bad", 10)
    run(kv, good)
    run(kv, bad)
    report = KVConnectorOutput(invalid_block_ids=frozenset({kv.blocks.table("bad")[0]}))
    assert kv.take_report(report, [good, bad]) == [bad]
    assert (kv.blocks.num_cached, good.caches_at == NEVER) == (0, not is_trusted)
    kv.release(bad)
    assert kv.take_report(KVConnectorOutput(), [good]) == []


def test_what_a_failed_request_computed_is_not_shared():
    """Its KV may be as wrong as its logits were."""
    kv = allocator()
    request = make("a")
    run(kv, request)
    assert kv.distrust([request], [request]) == []
    kv.release(request)
    assert run(kv, make("b")) == (0, 10)


def test_what_a_failed_request_found_stays():
    """Others computed it, and were right."""
    kv = allocator(num_blocks=30)
    run(kv, make("first", 17))
    failed = make("failed", 25)
    assert run(kv, failed)[0] == 16
    assert kv.distrust([failed], [failed]) == []
    kv.release(failed)
    assert run(kv, make("next", 25))[0] == 16


@pytest.mark.parametrize("has_ended", [False, True])
def test_who_shared_what_a_failed_request_computed_is_told(has_ended):
    """With all that it computed on top of it, though it has let go by now; who has only the common beginning goes on."""
    kv = allocator(num_blocks=40)
    first, failed, sharer = make("first", 9), make("failed", 17), make("sharer", 25)
    for request in (first, failed, sharer):
        run(kv, request)
    assert (failed.num_cached_tokens, sharer.num_cached_tokens) == (8, 16)
    if has_ended:
        kv.release(sharer)
    assert kv.distrust([failed], [first, failed, sharer]) == [sharer]
    kv.release(failed)
    kv.blocks.check_integrity()
    assert kv.blocks.num_cached == 2
    assert run(kv, make("next", 25))[0] == 8


def test_after_a_reset_running_requests_add_nothing_that_rests_on_the_old():
    """What they compute on is not what a new request would compute."""
    kv = allocator()
    request = make("a", 5)
    run(kv, request)
    kv.reset()
    kv.stop_caching(request)
    assert run(kv, make("b", 5)) == (0, 5)
    assert request.caches_at == NEVER
    kv.release(request)
    assert request.caches_at == 4
    assert repr(kv).startswith("<KVAllocator: prefix caching on, <BlockPool: 2/11 blocks")
