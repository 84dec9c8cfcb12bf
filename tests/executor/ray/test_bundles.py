from __future__ import annotations

from typing import Any

import pytest

from aexec.config import ExecutorConfig, ParallelConfig
from aexec.errors import ConfigError
from aexec.executor.ray.bundles import choose_bundles, demand, new_bundles, resource_of

MIXED = {0: {"CPU": 1.0}, 1: {"GPU": 1.0}, 2: {"CPU": 4.0, "GPU": 1.0}, 3: {"GPU": 0.5}, 4: {"GPU": 1.0}}


def config(ranks: int = 2, **settings: Any) -> ExecutorConfig:
    """Of so many ranks."""
    return ExecutorConfig(backend="ray", parallel=ParallelConfig(ranks), **settings)


@pytest.mark.parametrize(
    ("asked", "at_hand", "found"),
    [(None, {"CPU", "GPU"}, "GPU"), (None, {"CPU"}, "CPU"), ("CPU", {"GPU"}, "CPU"), ("XPU", {"GPU"}, "GPU"),
     ("TPU", {"TPU"}, "TPU"), ("pet", {"CPU"}, "pet")],
)  # fmt: skip
def test_a_worker_takes_what_is_asked_for_else_a_gpu_else_a_cpu(
    asked: str | None, at_hand: set[str], found: str
) -> None:
    """Ray counts XPUs as GPUs."""
    assert resource_of(config(ray_resource=asked), at_hand) == found


def test_a_group_of_our_own_has_a_bundle_for_each_rank() -> None:
    """With what is to be reserved besides; the same resource adds up."""
    assert new_bundles(config(3, ray_bundle_resources={"CPU": 4}), "GPU") == ({"GPU": 1.0, "CPU": 4},) * 3
    assert new_bundles(config(1, ray_bundle_resources={"CPU": 4}), "CPU") == ({"CPU": 5.0},)
    assert new_bundles(config(2, ray_resource_per_worker=0.5), "GPU") == ({"GPU": 0.5},) * 2


def test_an_actor_asks_for_its_device_and_for_no_cpu() -> None:
    """Of a bundle of CPUs it asks nothing: somebody else may sit in it."""
    assert demand("GPU", 0.5) == {"num_cpus": 0, "num_gpus": 0.5}
    assert demand("TPU", 1.0) == {"num_cpus": 0, "resources": {"TPU": 1.0}}
    assert demand("CPU", 2.0) == {"num_cpus": 0}


def test_the_first_bundles_that_have_the_resource_are_taken() -> None:
    """That of a driver without a device is passed over, and one that has too little."""
    assert choose_bundles(config(3), MIXED, "GPU") == (1, 2, 4)
    assert choose_bundles(config(4, ray_resource_per_worker=0.5), MIXED, "GPU") == (1, 2, 3, 4)


def test_the_bundles_that_are_named_are_taken_in_their_order() -> None:
    """Rank 0 is in the first that was named."""
    assert choose_bundles(config(bundle_indices=(4, 1)), MIXED, "GPU") == (4, 1)


@pytest.mark.parametrize(
    ("ranks", "settings", "resource", "wrong"),
    [
        (4, {}, "GPU", "cannot hold 4 ranks: 3 of its bundles have GPU: 1 (ray_resource, ray_resource_per_worker)."),
        (1, {}, "TPU", "cannot hold 1 rank: 0 of its bundles have TPU: 1 (ray_resource, ray_resource_per_worker)."),
        (2, {"bundle_indices": (1, 1)}, "GPU", "bundle_indices names 1 more than once."),
        (2, {"bundle_indices": (1, 9)}, "GPU", "it has no bundle 9."),
        (2, {"bundle_indices": (1,)}, "GPU", "bundle_indices names 1 bundles."),
        (2, {"bundle_indices": (1, 3)}, "GPU", "bundle 3 has less than GPU: 1."),
        (
            3,
            {"bundle_indices": (9, 3, 1, 1)},
            "GPU",
            "bundle_indices names 1 more than once; it has no bundle 9; bundle 3 has less than GPU: 1.",
        ),
    ],
)
def test_all_that_is_wrong_with_a_group_is_in_one_report_with_its_bundles(
    ranks: int, settings: dict[str, Any], resource: str, wrong: str
) -> None:
    """So that it is mended at once."""
    with pytest.raises(ConfigError) as caught:
        choose_bundles(config(ranks, **settings), MIXED, resource)
    assert wrong in str(caught.value)
    assert "Its bundles:\n       0  {CPU: 1}\n       1  {GPU: 1}\n       2  {CPU: 4, GPU: 1}\n" in str(caught.value)


def test_a_bundle_with_several_devices_is_refused() -> None:
    """A rank would hold devices that it never uses; bundles of CPUs may be as large as one likes."""
    with pytest.raises(ConfigError, match="bundle 0 has more than one GPU, and is for one rank"):
        choose_bundles(config(1), {0: {"GPU": 8.0}}, "GPU")
    assert choose_bundles(config(1), {0: {"CPU": 8.0}}, "CPU") == (0,)
