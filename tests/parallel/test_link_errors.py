"""What a rank says when it has waited in vain."""

from __future__ import annotations

import pickle

import pytest

from aexec.errors import PeerLost


@pytest.mark.parametrize(("peer", "whom"), [(0, "rank 0"), (None, "its group")])
def test_a_lost_peer_is_named_and_survives_the_way_to_the_driver(peer, whom):
    """Who waited, for whom, for what; pickled with all it knows."""
    error = PeerLost(1, peer, "receive the hidden states of step 7", "Connection closed by peer")
    again = pickle.loads(pickle.dumps(error))
    assert vars(again) == vars(error)
    assert str(again) == (
        f"rank 1 could not receive the hidden states of step 7: {whom} is gone or too late (Connection closed by peer)"
    )
