"""``n`` samples of one prompt: a request each, of which the first computes the prompt for all.

The others wait for it, and then find the prompt's full blocks in the cache. Each has a seed of
its own that follows from the first one's, so that a seed decides all samples, and the first
of them is what a request with ``n=1`` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from hashlib import blake2b

import msgspec

from aexec.engine.request import Request

__all__ = ("give_seed", "leave_samples", "release_followers", "sample_id", "samples_of", "seed_of_sample")


def samples_of(request: Request) -> list[Request]:
    """The requests that ``request`` stands for: itself, and ``n - 1`` that wait for it."""
    num_samples = request.sampling.n
    if num_samples == 1:
        return [request]
    request.sampling = msgspec.structs.replace(request.sampling, n=1)
    sampling = msgspec.structs.replace(request.sampling, seed=None)
    request.followers = [
        dataclasses.replace(
            request,
            request_id=sample_id(request.request_id, index),
            index=index,
            sampling=sampling,
            token_ids=request.token_ids.copy(),
            leader=request,
            followers=[],
            prompt_logprobs=[],
            block_hashes=[],
        )
        for index in range(1, num_samples)
    ]
    return [request, *request.followers]


def sample_id(request_id: str, index: int) -> str:
    """The id of a request's sample; the first has the request's own.

    >>> sample_id("a", 0), sample_id("a", 2)
    ('a', 'a#2')
    """
    return f"{request_id}#{index}" if index else request_id


def give_seed(request: Request, draw_seed: Callable[[], int]) -> None:
    """See to it that a sampled request has a seed: its own, its first sample's, or one that is drawn."""
    sampling = request.sampling
    if sampling.is_greedy or sampling.seed is not None:
        return
    first = request.leader.sampling.seed if request.leader is not None else None
    seed = draw_seed() if first is None else seed_of_sample(first, request.index)
    request.sampling = msgspec.structs.replace(sampling, seed=seed)


def release_followers(request: Request) -> list[Request]:
    """The prompt is computed: those who waited for it wait for their turn only, and find it in the cache."""
    followers, request.followers = request.followers, []
    for follower in followers:
        follower.leader = None
    return followers


def leave_samples(request: Request) -> Request | None:
    """A sample ends; returns who computes the prompt now, if others wait for that."""
    if request.leader is not None:
        request.leader.followers.remove(request)
        request.leader = None
    if not request.followers:
        return None
    successor, *rest = release_followers(request)
    successor.followers = rest
    for follower in rest:
        follower.leader = successor
    return successor


def seed_of_sample(seed: int, index: int) -> int:
    """The seed of a further sample, a signed integer of 64 bits.

    >>> seed_of_sample(7, 1), seed_of_sample(7, 2)
    (2174948161648732372, -6334596525103780521)
    """
    digest = blake2b(b"%d/%d" % (seed, index), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
