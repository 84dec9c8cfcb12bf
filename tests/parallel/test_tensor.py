"""What ranks that share layers say to each other; over real ranks in tests/model/transformer/test_tensor_parallel.py."""

from __future__ import annotations

import pytest
import torch

from aexec.errors import ConfigError, PeerLost
from aexec.parallel import tensor as tensor_module
from aexec.parallel.tensor import Split, TensorGroup


@pytest.fixture
def member(monkeypatch):
    """Makes one of ``size`` ranks, whose peers do not exist."""

    def make(rank, size):
        monkeypatch.setattr(tensor_module.distributed, "get_rank", lambda group=None: rank if group else 4 + rank)
        monkeypatch.setattr(tensor_module.distributed, "get_world_size", lambda _group: size)
        return TensorGroup("group")

    return make


@pytest.mark.parametrize("size", [4, 7, 2, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shares_leave_no_gap_and_do_not_overlap(member, size, ranks) -> None:
    """In the order of ranks; the last ones have less, or nothing, when it does not divide."""
    shares = [member(rank, ranks).share(size) for rank in range(ranks)]
    assert [place for share in shares for place in share] == list(range(size))
    assert [len(share) for share in shares] == sorted((len(share) for share in shares), reverse=True)


@pytest.mark.parametrize("split", [Split(0), Split(-1), Split(1, groups=2), Split(-2)])
def test_parts_side_by_side_are_the_whole(member, split) -> None:
    """Along either side; with two matrices in one, each of them is dealt out."""
    whole = torch.arange(48.0).reshape(4, 12)
    parts = [member(rank, 2).part(whole, split) for rank in range(2)]
    matrices = [part.chunk(split.groups, split.dim) for part in parts]
    again = torch.cat([torch.cat(pieces, split.dim) for pieces in zip(*matrices, strict=True)], split.dim)
    assert torch.equal(again, whole)


def test_a_group_is_the_one_that_the_layout_says(member) -> None:
    """Anything else would add up the wrong parts."""
    member(1, 2)
    assert repr(TensorGroup.checked("group", 1, 2)) == "<TensorGroup: 1 of 2>"
    with pytest.raises(ConfigError, match=r"has this rank as 1 of 2: expected 0 of 4"):
        TensorGroup.checked("group", 0, 4)


def test_without_a_group_nothing_is_shared() -> None:
    """The error says what has to be called before."""
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2, .* call join\(\) before load_model\(\)"):
        TensorGroup.checked(None, 0, 2)


@pytest.mark.parametrize(
    ("exchange", "call"),
    [
        ("all_reduce", lambda group, part: group.sum(part)),
        ("all_gather", lambda group, part: group.joined(part, 4)),
        ("gather", lambda group, part: group.joined_on_first(part, 4)),
        ("broadcast", lambda group, _part: group.told_by_first([1, 2])),
    ],
)
def test_a_lost_peer_has_a_name_for_it(member, monkeypatch, exchange, call) -> None:
    """What torch says becomes an error of ours, with the rank that waited, in the world's count."""

    def fail(*_args, **_options):
        raise RuntimeError("[../gloo/transport/tcp/pair.cc:1] Connection closed by peer\nmaybe this, maybe that")

    group = member(1, 2)
    monkeypatch.setattr(tensor_module.distributed, exchange, fail)
    with pytest.raises(PeerLost, match=r"rank 5 could not .* layer's output: .*\(Connection closed by peer\)"):
        call(group, torch.ones(1, 2))
