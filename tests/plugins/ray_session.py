"""One Ray cluster for all tests marked ``ray``: started with the first of them, ended with the session.

Tests with the mark run after all others, so that whoever looks at processes, descriptors
or idle time sees no Ray. Each of them ends with no actor and no placement group of its own.
"""

from __future__ import annotations

import gc
import logging
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aexec.testing.leaks import LeakCheck

CPUS = 6
OBJECT_STORE = 2 * 2**30  # bytes; used as they are touched. Ray keeps what a graph had of them until its driver leaves
PATIENCE = 60.0  # seconds for a start or an end, on a busy machine
GONE = 5.0  # seconds in which what a test has killed must be dead
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",  # else a token is written into the home folder, and other clusters ask for it
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_global_gc_min_interval_s": "3600",  # a store that is 70 % full has all processes collect garbage: that is not idle
    "RES_OPTIONS": "timeout:1 attempts:1",  # torch asks for names of addresses that no server knows
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # as it will be; without it Ray warns of the change
}
# What an open executor has more of, with time: its graph is built again, its arena grows, copies of large messages.
GROWING = ("CompiledGraphMonitorThread", "aexec-graph-read", "/memfd:aexec", "aexec-copy", "DAGDriverProxyActor")
OVER = ("DEAD", "REMOVED")


class Semaphores:
    """Removes what a node that is killed leaves in ``/dev/shm``, and it alone can remove: the names of its semaphores."""

    def __init__(self) -> None:
        self._before = set(_semaphores())

    def sweep(self) -> None:
        """Remove those that have come since and whose process is gone."""
        for path in set(_semaphores()) - self._before:
            owner = re.match(r"sem\.(?:hdr|obj)(\d+)-", path.name)
            if owner is not None and not Path("/proc", owner[1]).exists():
                path.unlink(missing_ok=True)


class Cluster:
    """A local cluster that this process has joined.

    Attributes:
        folder: Where Ray keeps its sessions, short enough for the names of sockets.
        address: For other programs, which may join it.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="axr-", dir="/tmp"))
        self.address = ""
        self._semaphores = Semaphores()
        self._up, self._over = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        # What Ray starts is killed when the *thread* ends that started it; off the main one Ray sets no signal handlers.
        self._thread = threading.Thread(target=self._live, name="ray-cluster")

    def __repr__(self) -> str:
        return f"<Cluster {self.address or 'not up'} in {self.folder}>"

    def open(self) -> None:
        """Start it, and wait until it is up."""
        self._thread.start()
        assert self._up.wait(PATIENCE), "the cluster does not come up"
        if self._failure is not None:
            self.close()
            raise self._failure

    def close(self) -> None:
        """End it, and remove its files."""
        self._over.set()
        self._thread.join(PATIENCE)
        self._semaphores.sweep()
        shutil.rmtree(self.folder, ignore_errors=True)

    def belongings(self) -> dict[str, str]:
        """Actors and placement groups that are alive, in words."""
        import ray
        from ray.util import placement_group_table

        actors = {key: f"actor {info['ActorClassName']}, {info['State']}" for key, info in _actors().items()}
        groups = {
            key: f"placement group {info['state']} {info['name']}" for key, info in placement_group_table().items()
        }
        assert ray.is_initialized()
        return {key: what for key, what in {**actors, **groups}.items() if not any(word in what for word in OVER)}

    def actors(self) -> list[str]:
        """Actors that are alive, in words."""
        return [what for what in self.belongings().values() if what.startswith("actor")]

    def placement_groups(self) -> list[str]:
        """Placement groups that are there, in words."""
        return [what for what in self.belongings().values() if what.startswith("placement")]

    def left_since(self, before: dict[str, str], patience: float = GONE, *, ignore: Collection[str] = ()) -> list[str]:
        """What has come since, and does not go within so many seconds; whatever has a piece of ``ignore`` may stay."""
        give_up = time.monotonic() + patience
        while left := [what for what in self._since(before) if not any(piece in what for piece in ignore)]:
            if time.monotonic() > give_up:
                break
            gc.collect()  # an actor ends with the last reference to it
            threading.Event().wait(0.02)
        self._remove(key for key in self.belongings() if key not in before)
        return left

    def _since(self, before: dict[str, str]) -> list[str]:
        return [what for key, what in self.belongings().items() if key not in before]

    def _remove(self, left: Iterable[str]) -> None:
        """Take placement groups away, and their actors with them: the next test needs the room."""
        from ray._raylet import PlacementGroupID
        from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

        for key in placement_group_table().keys() & set(left):
            remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(key)))

    def _live(self) -> None:
        try:
            self._start()
        except BaseException as error:  # told to whoever waits
            self._failure = error
        self._up.set()
        self._over.wait()
        import ray

        ray.shutdown()

    def _start(self) -> None:
        import ray

        context = ray.init(
            address="local",
            num_cpus=CPUS,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=OBJECT_STORE,
        )
        self.address = context.address_info["gcs_address"]
        self._warm_up()

    def _warm_up(self) -> None:
        """Open what Ray opens once and keeps, before a test looks for leaks."""
        import ray

        self.belongings()
        large = ray.remote(lambda: bytes(2**20))
        assert len(ray.get(large.options(num_cpus=0).remote(), timeout=PATIENCE)) == 2**20


def _semaphores() -> Iterator[Path]:
    return Path("/dev/shm").glob("sem.*")


def _actors() -> dict[str, Any]:
    """Of this cluster; the public way of asking wants a dashboard."""
    from ray._private.state import actors

    return actors()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Cluster]:
    """The cluster of the session, which this process is in."""
    cluster = Cluster()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**SETTINGS, "RAY_TMPDIR": str(cluster.folder)}.items():
            patch.setenv(name, value)
        logging.getLogger("ray").setLevel(logging.ERROR)
        cluster.open()
        gc.collect()
        gc.freeze()  # Ray, too, is here to stay: collections need not look through it
        yield cluster
        cluster.close()


@pytest.fixture
def leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing of ours is left in this process, and with the mark ``ray`` nothing in the cluster."""
    if request.node.get_closest_marker("ray") is None:
        with LeakCheck():
            yield
        return
    cluster = request.getfixturevalue("ray_cluster")
    before = cluster.belongings()
    ignore = GROWING if before else ()
    with LeakCheck(ignore=ignore):
        yield
    assert cluster.left_since(before, ignore=ignore) == []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the cluster come last; whatever their order is, it is kept."""
    items.sort(key=lambda item: item.get_closest_marker("ray") is not None)
