from __future__ import annotations

import pytest

from aexec.errors import PlacementFailed
from aexec.executor.ray.capacity import NodeState, explain, impossible, resources_text, table

SMALL = NodeState(node_id="a" * 20, ip="10.0.0.1", total={"CPU": 4.0, "memory": 1e9}, free={"CPU": 1.5})
BIG = NodeState(node_id="b" * 20, ip="10.0.0.2", total={"CPU": 8.0, "GPU": 2.0, "node:10.0.0.2": 1.0}, free={})
DEAD = NodeState(node_id="c" * 20, ip="10.0.0.3", alive=False, total={"GPU": 8.0})
NODES = (SMALL, BIG, DEAD)


@pytest.mark.parametrize(
    ("bundles", "strategy", "reason"),
    [
        ([{"GPU": 1.0}] * 2, "PACK", ""),
        ([{"GPU": 0.5}] * 4, "STRICT_PACK", ""),
        ([{"CPU": 1.0}] * 12, "PACK", ""),
        ([{"CPU": 1.0}] * 2, "STRICT_SPREAD", ""),
        ([{"CPU": 4.0, "GPU": 1.0}] * 2, "PACK", ""),
        ([{"pet": 99.0}], "PACK", "no node has pet: 99 (the most is 0)"),
        ([{"GPU": 3.0}], "PACK", "no node has GPU: 3 (the most is 2)"),
        ([{"CPU": 9.0, "GPU": 1.0}], "PACK", "no node has CPU: 9 (the most is 8)"),
        ([{"GPU": 1.0}] * 3, "PACK", "all nodes together have GPU: 2, and the bundles want 3"),
        ([{"CPU": 3.0}] * 4, "SPREAD", "there is room for 3 of 4 bundles on all nodes, if they were empty"),
        (
            [{"CPU": 3.0}] * 3,
            "STRICT_PACK",
            "no node has CPU: 9 (the most is 8), and STRICT_PACK wants all bundles on one",
        ),
        ([{"GPU": 1.0}] * 2, "STRICT_SPREAD", "1 node could take one, and STRICT_SPREAD wants one on each of 2"),
        ([{"CPU": 1.0}] * 3, "STRICT_SPREAD", "2 nodes could take one, and STRICT_SPREAD wants one on each of 3"),
    ],
)
def test_what_can_never_fit_is_known_with_the_reason(
    bundles: list[dict[str, float]], strategy: str, reason: str
) -> None:
    """From totals alone: what others have taken may come back, and a dead node's does not count."""
    assert impossible(bundles, strategy, NODES) == reason


def test_a_node_may_have_each_thing_and_no_node_all() -> None:
    """A bundle is in one piece."""
    apart = (
        NodeState(node_id="a", ip="10.0.0.1", total={"CPU": 8.0}),
        NodeState(node_id="b", ip="10.0.0.2", total={"GPU": 1.0}),
    )
    assert impossible([{"CPU": 1.0, "GPU": 1.0}], "PACK", apart) == "no node has CPU: 1, GPU: 1 at once"


def test_what_is_wanted_is_told_against_each_node_s_total_and_free() -> None:
    """A GPU that was registered under another name can be seen; Ray's own names cannot."""
    odd = NodeState(node_id="d" * 20, ip="10.0.0.4", total={"A100": 1.0}, free={"A100": 1.0, "A100_group_0_ff": 1.0})
    assert explain([{"GPU": 1.0}] * 3, "PACK", (*NODES, odd)) == (
        "wanted, by PACK:\n"
        "  3 x {GPU: 1}\n"
        "it can never come as the cluster is: all nodes together have GPU: 2, and the bundles want 3\n"
        "nodes:\n"
        "  node          address   total            free\n"
        "  aaaaaaaaaaaa  10.0.0.1  GPU: 0, CPU: 4   GPU: 0, CPU: 1.5\n"
        "  bbbbbbbbbbbb  10.0.0.2  GPU: 2, CPU: 8   GPU: 0\n"
        "  cccccccccccc  10.0.0.3  dead\n"
        "  dddddddddddd  10.0.0.4  GPU: 0, A100: 1  GPU: 0, A100: 1"
    )


def test_what_could_fit_is_waited_for_and_said_so() -> None:
    """Others have it."""
    assert "it would come if others gave back what they have taken" in explain([{"GPU": 1.0}], "PACK", NODES)


def test_a_placement_that_failed_says_after_how_long_and_why() -> None:
    """The setting is named; the details are those of the nodes."""
    error = PlacementFailed(2.5, explain([{"pet": 99.0}], "PACK", NODES), never=True)
    assert str(error).startswith("the placement group has not come within 2.5 s (placement_timeout); wanted, by PACK:")
    assert isinstance(error, TimeoutError)


def test_nothing_is_a_word() -> None:
    """A node without resources has a line too."""
    assert resources_text({}) == "nothing"
    assert table((), (NodeState(node_id="a", ip="::1"),)).endswith("a     ::1      nothing  nothing")
