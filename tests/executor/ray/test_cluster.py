from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from aexec.config import ExecutorConfig, ParallelConfig
from aexec.errors import ConfigError
from aexec.executor.ray.cluster import init_options, join, where


def config(ranks: int = 2, **settings: Any) -> ExecutorConfig:
    """Of so many ranks."""
    return ExecutorConfig(backend="ray", parallel=ParallelConfig(ranks), **settings)


@pytest.mark.parametrize(
    ("asked", "variable", "found"),
    [
        (None, None, "local"),
        (None, "h:1", "h:1"),
        ("g:2", "h:1", "g:2"),
        ("local", "h:1", "local"),
        (None, "", "local"),
    ],
)
def test_the_address_is_the_setting_s_else_the_variable_s_else_a_cluster_of_our_own(
    asked: str | None, variable: str | None, found: str
) -> None:
    """Whatever cluster happens to run on this machine is not joined."""
    environment = {} if variable is None else {"RAY_ADDRESS": variable}
    assert where(config(ray_address=asked), environment) == found


def test_a_ray_client_is_refused() -> None:
    """It is on no node, and workers could not reach it."""
    with pytest.raises(ConfigError, match=r"'ray://head:10001': a Ray Client is on no node .* without ray://"):
        where(config(), {"RAY_ADDRESS": "ray://head:10001"})


def test_a_cluster_of_our_own_has_no_dashboard_and_cpus_enough_for_workers_on_cpus() -> None:
    """Four workers come up on two cores; the niceness is the user's if he says one."""
    options = init_options(config(4), "local", {}, cpus=2)
    assert options == {
        "address": "local",
        "include_dashboard": False,
        "num_cpus": 4,
        "log_to_driver": True,
        "logging_level": logging.ERROR,
        "_system_config": {"worker_niceness": 0},
    }
    assert init_options(config(2, ray_bundle_resources={"CPU": 3}), "local", {}, cpus=2)["num_cpus"] == 8
    assert init_options(config(4, ray_resource="GPU"), "local", {}, cpus=2)["num_cpus"] == 2
    assert "_system_config" not in init_options(config(), "local", {"RAY_worker_niceness": "5"}, cpus=2)


def test_a_cluster_that_is_joined_is_taken_as_it_is() -> None:
    """Ray refuses resources for what it did not start; nothing printed is nothing forwarded."""
    environment = {"AEXEC_LOG_LEVEL": "debug"}
    assert init_options(config(worker_output="none"), "h:1", environment, cpus=2) == {
        "address": "h:1",
        "log_to_driver": False,
        "logging_level": logging.INFO,
    }


@pytest.mark.anyio
@pytest.mark.ray
async def test_the_cluster_that_this_process_is_on_is_used_and_stays(ray_cluster: Any) -> None:
    """Without an address, by its address, and as ``auto``; leaving it twice is leaving it once."""
    for address in (None, ray_cluster.address, "auto"):
        cluster = await join(config(ray_address=address))
        assert cluster.address == ray_cluster.address
        assert not cluster.started_here
        (node,) = await cluster.nodes()
        assert (node.node_id, node.ip) == (cluster.node_id, cluster.node_ip)
        await cluster.leave()
        await cluster.leave()
        assert ", left" not in repr(cluster)
        assert ": left, this is" in repr(cluster)
    assert ray_cluster.actors() == []


@pytest.mark.anyio
@pytest.mark.ray
@pytest.mark.parametrize("address", ["local", "192.0.2.77:6379"])
async def test_a_second_cluster_is_refused_for_a_process_that_is_on_one(ray_cluster: Any, address: str) -> None:
    """Both addresses are in the text, and the connection is as it was."""
    with pytest.raises(
        ConfigError, match=f"ray_address is '{address}' and this process is connected to .* one at a ti"
    ):
        await join(config(ray_address=address))
    cluster = await join(config())
    await cluster.leave()


def run(program: str, environment: dict[str, str]) -> Any:
    """What a program of its own prints as JSON in its last line."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


OWN = """
    import asyncio, json, os, signal, threading
    from pathlib import Path
    from aexec.config import ExecutorConfig, ParallelConfig
    from aexec.executor.ray.cluster import join

    config = ExecutorConfig(backend="ray", parallel=ParallelConfig(3))
    got = {}

    async def main():
        loop = asyncio.get_running_loop()
        terminated = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, terminated.set)
        first, second = await asyncio.gather(join(config), join(config))
        got["ours"] = first.started_here and second.started_here
        got["cpus"] = [node.total["CPU"] for node in await first.nodes()]
        await first.leave()
        import ray
        got["stays"] = ray.is_initialized()
        sessions = Path(os.environ["RAY_TMPDIR"], "ray")
        got["sessions"] = sum(path.is_dir() and not path.is_symlink() for path in sessions.iterdir())
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(terminated.wait(), 5)
        got["alarm"] = signal.getitimer(signal.ITIMER_REAL)[0]  # Ray's own handler sets one that ends the process
        await second.leave()
        got["ended"] = not ray.is_initialized()
        got["left"] = [path.name for path in sessions.iterdir()]
        got["auth"] = os.environ.get("RAY_AUTH_MODE")
        got["threads"] = [thread.name for thread in threading.enumerate() if thread.name == "aexec-ray-connection"]

    asyncio.run(main())
    print(json.dumps(got))
"""


@pytest.mark.ray
def test_a_cluster_of_our_own_is_shared_and_ends_with_its_last_user(
    ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """SIGTERM stays the program's all the while, and neither a file nor a thread is left."""
    folder = tmp_path_factory.mktemp("r")
    assert run(OWN, {"RAY_TMPDIR": str(folder)}) == {
        "ours": True,
        "cpus": [float(max(3, len(os.sched_getaffinity(0))))],
        "stays": True,
        "sessions": 1,
        "alarm": 0.0,
        "ended": True,
        "left": [],
        "auth": "disabled",
        "threads": [],
    }


JOINED = """
    import asyncio, json
    from aexec.config import ExecutorConfig, ParallelConfig
    from aexec.errors import ConfigError
    from aexec.executor.ray.cluster import join

    async def main():
        cluster = await join(ExecutorConfig(backend="ray"))
        import ray
        found = [cluster.address, cluster.started_here, ray.is_initialized()]
        await cluster.leave()
        return [*found, ray.is_initialized()]

    print(json.dumps(asyncio.run(main())))
"""


@pytest.mark.ray
def test_a_cluster_is_joined_by_its_address_and_stays_when_it_is_left(ray_cluster: Any) -> None:
    """RAY_ADDRESS says which; the process is connected to none in the end."""
    found = run(JOINED, {"RAY_ADDRESS": ray_cluster.address})
    assert found == [ray_cluster.address, False, True, False]
    assert ray_cluster.placement_groups() == []


NOBODY = """
    import asyncio, json, sys
    from aexec.config import ExecutorConfig
    from aexec.errors import ConfigError
    from aexec.executor.ray.cluster import join

    try:
        asyncio.run(join(ExecutorConfig(backend="ray", ray_address=sys.argv[-1])))
    except ConfigError as error:
        print(json.dumps(str(error)))
"""


def test_nobody_at_an_address_is_an_error_at_once() -> None:
    """Ray itself would try for a minute and end the process then."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        text = run(NOBODY.replace("sys.argv[-1]", repr(address)), {})
    assert f"nobody answers at the Ray address '{address}'" in text
    assert "leave the address out (ray_address, RAY_ADDRESS) to have a cluster of your own" in text
