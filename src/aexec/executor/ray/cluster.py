"""The Ray cluster that workers run on: the one this process is in, one that is joined, or one of our own.

A process is connected to one cluster at a time, whoever connected it. So the connection that
this module makes is shared by all executors of the process and ends with the last of them; one
that was there before (an actor, a task, Ray Serve, the user's ``ray.init``) is left alone.

What Ray starts for a cluster of our own is killed when the *thread* ends that started it, not
the process; and on the main thread Ray's Python part would take the process's signals. So the
connection has a thread of its own, from ``init`` to ``shutdown``; for Ray's native part see ``signals``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aexec import environ
from aexec.config import ExecutorConfig
from aexec.errors import ConfigError
from aexec.executor.ray import api
from aexec.executor.ray.capacity import NodeState
from aexec.executor.ray.signals import kept_signals

__all__ = ("LOCAL", "Cluster", "init_options", "join", "where")

LOCAL = "local"
_AUTH_MODE = "RAY_AUTH_MODE"
_LEAVE_LIMIT = 12.0  # seconds for ``ray.shutdown``, which takes one or two
_PROBE_LIMIT = 5.0  # seconds for somebody to answer at an address
_QUERY_LIMIT = 10.0  # seconds for a question to Ray's control store


class Cluster:
    """The cluster, as long as the executor is on it; made by :func:`join`.

    Attributes:
        address: Of its control store, as ``ray.init(address=...)`` takes it.
        node_id: Ray's id of this process's node.
        node_ip: The node's address in Ray's table.
        started_here: True if it is one of our own, which ends with the last executor that uses it.
    """

    def __init__(self, address: str, node_id: str, node_ip: str, *, started_here: bool) -> None:
        self.address, self.node_id, self.node_ip, self.started_here = address, node_id, node_ip, started_here
        self._is_joined = True

    def __repr__(self) -> str:
        own = ", our own" * self.started_here
        return f"<Cluster {self.address}{own}: {'joined' if self._is_joined else 'left'}, this is {self.node_ip}>"

    async def nodes(self) -> tuple[NodeState, ...]:
        """All nodes, those that are dead too.

        Raises:
            CallTimeout: Ray's control store does not answer.
        """
        return await api.off_loop("nodes", _nodes, timeout=_QUERY_LIMIT)

    async def leave(self) -> None:
        """Let go of the cluster; may be called twice. What was there before us stays.

        Raises:
            CallTimeout: Ray takes too long to end.
        """
        if self._is_joined:
            self._is_joined = False
            await api.off_loop("shutdown", _CONNECTION.leave, self, timeout=_LEAVE_LIMIT)


async def join(config: ExecutorConfig) -> Cluster:
    """Get onto the cluster that the settings mean.

    Raises:
        ConfigError: There is none at the address, or it lets nobody in without a token, or
            this process is on another one.
        CallTimeout: It takes longer than ``start_timeout``.
    """
    return await api.off_loop("init", _CONNECTION.enter, config, timeout=config.start_timeout, undo=_CONNECTION.leave)


def where(config: ExecutorConfig, environment: Mapping[str, str]) -> str:
    """The address of the cluster of a process that is on none yet. Pure.

    Args:
        config: The settings.
        environment: The process's.

    Raises:
        ConfigError: It is one of Ray Client.
    """
    address = config.ray_address or environment.get("RAY_ADDRESS") or LOCAL
    if address.startswith("ray://"):
        raise ConfigError(
            f"the Ray address is {address!r}: a Ray Client is on no node of the cluster, and its workers cannot reach "
            "it. Run this program on a node ('ray job submit', or a shell there), and give the address without ray://, "
            "as in 'head:6379'"
        )
    return address


def init_options(config: ExecutorConfig, address: str, environment: Mapping[str, str], cpus: int) -> dict[str, Any]:
    """What ``ray.init`` is called with. Pure.

    Args:
        config: The settings.
        address: See :func:`where`.
        environment: The process's.
        cpus: CPUs of this machine.
    """
    options: dict[str, Any] = {
        "address": address,
        "log_to_driver": config.worker_output != "none",
        "logging_level": logging.INFO if environ.LOG_LEVEL.read(environment) in {"debug", "info"} else logging.ERROR,
    }
    if address == LOCAL:
        options["include_dashboard"] = False
        options["num_cpus"] = max(cpus, math.ceil(_cpus_wanted(config)))
        if "RAY_worker_niceness" not in environment:
            options["_system_config"] = {"worker_niceness": 0}  # 15 by default: starved by whatever else runs
    return options


def _cpus_wanted(config: ExecutorConfig) -> float:
    own = config.ray_resource_per_worker if config.ray_resource in {None, "CPU"} else 0.0
    return config.parallel.world_size * (own + config.ray_bundle_resources.get("CPU", 0.0))


class _Connection:
    """This process's connection, if it is ours, and who uses it; its methods block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: _Owner | None = None
        self._users: set[Cluster] = set()

    def enter(self, config: ExecutorConfig) -> Cluster:
        """Connect, unless that is done; whoever comes is to leave."""
        with self._lock:
            if self._owner is not None and not self._owner.is_current():
                self._end()  # somebody has disconnected this process, and perhaps connected it again
            if not api.is_connected():
                self._owner = _connect(config)
            try:
                cluster = _here(started_here=self._owner is not None and self._owner.address == LOCAL)
                _check_same(config, cluster)
            except BaseException:
                self._end_unused()
                raise
            self._users.add(cluster)
            return cluster

    def leave(self, cluster: Cluster) -> None:
        """The last one disconnects."""
        with self._lock:
            if cluster in self._users:
                self._users.remove(cluster)
                self._end_unused()

    def _end_unused(self) -> None:
        if not self._users:
            self._end()

    def _end(self) -> None:
        self._users.clear()
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.end()


class _Owner(threading.Thread):
    """Connects this process, and lives until it is disconnected."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(name="aexec-ray-connection", daemon=True)
        self.address: str = options["address"]
        self.error: BaseException | None = None
        self._options, self._job, self._session = options, "", ""
        self._auth_mode = environ.inherited().get(_AUTH_MODE)
        self._is_up, self._is_over = threading.Event(), threading.Event()

    def run(self) -> None:
        """Connect, wait, disconnect."""
        try:
            with kept_signals():
                context = api.ray().init(**self._options)
            self._session = context.address_info["session_dir"]
            self._job = _job()
        except BaseException as error:  # noqa: BLE001 - whoever waits raises it
            self.error = error
        self._is_up.set()
        if self.error is None:
            self._is_over.wait()
        if self.error is not None or self.is_current():
            with contextlib.suppress(Exception):  # half a start
                api.ray().shutdown()
        if self.address == LOCAL:
            environ.change({_AUTH_MODE: self._auth_mode})  # a start of Ray's own sets it, for whatever comes after
            _remove_session(self._session)

    def is_current(self) -> bool:
        """Whether this process's connection is still the one that was made here."""
        return api.is_connected() and _job() == self._job

    def up(self) -> None:
        """Start, and wait until it is connected."""
        self.start()
        self._is_up.wait()
        if self.error is not None:
            self.join()
            raise self.error

    def end(self) -> None:
        """Disconnect."""
        self._is_over.set()
        self.join()


def _connect(config: ExecutorConfig) -> _Owner:
    environment = environ.inherited()
    address = where(config, environment)
    _probe(address)
    options = init_options(config, address, environment, len(os.sched_getaffinity(0)))
    owner = _Owner(options)
    try:
        owner.up()
    except Exception as error:
        if address == LOCAL or not isinstance(error, (ConnectionError, RuntimeError, *api.system_errors())):
            raise
        raise ConfigError(
            f"no Ray cluster was joined at {address!r} ({_first_line(error)}). Is it one? If it asks for a token, set "
            f"RAY_AUTH_MODE=token (here it is {environment.get(_AUTH_MODE) or 'not set'}), and RAY_AUTH_TOKEN_PATH if "
            "the token is not in ~/.ray, for this program and for each 'ray start' alike"
        ) from error
    return owner


def _probe(address: str) -> None:
    """Fail at once where nobody answers: Ray tries for a minute, and then ends the process."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        return  # a name that Ray itself looks up, such as ``auto``
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_LIMIT).close()
    except OSError as error:
        raise ConfigError(
            f"nobody answers at the Ray address {address!r} ({error}): start the cluster there ('ray start --head "
            f"--port={port}'), or leave the address out (ray_address, RAY_ADDRESS) to have a cluster of your own"
        ) from error


def _here(*, started_here: bool) -> Cluster:
    context = api.ray().get_runtime_context()
    node_id = str(context.get_node_id())
    ip = next((node.ip for node in _nodes() if node.node_id == node_id), "")
    return Cluster(str(context.gcs_address), node_id, ip, started_here=started_here)


def _job() -> str:
    return str(api.ray().get_runtime_context().get_job_id())


def _nodes() -> tuple[NodeState, ...]:
    ray = api.ray()
    free = ray._private.state.available_resources_per_node()  # noqa: SLF001 - the public one asks the dashboard
    return tuple(
        NodeState(
            node_id=node["NodeID"],
            ip=node["NodeManagerAddress"],
            alive=node["Alive"],
            total=node["Resources"],
            free=free.get(node["NodeID"], {}),
        )
        for node in ray.nodes()
    )


def _check_same(config: ExecutorConfig, cluster: Cluster) -> None:
    asked = config.ray_address
    if asked is None or asked == "auto" or (asked == LOCAL and cluster.started_here) or _same(asked, cluster.address):
        return
    raise ConfigError(
        f"ExecutorConfig.ray_address is {asked!r} and this process is connected to the Ray cluster at "
        f"{cluster.address!r}: it can be on one at a time. Leave ray_address out to use that one, or disconnect first "
        "(ray.shutdown())"
    )


def _same(one: str, other: str) -> bool:
    """Whether two addresses lead to the same place, whatever name they use for it."""
    if one == other:
        return True
    (host, _, port), (other_host, _, other_port) = one.rpartition(":"), other.rpartition(":")
    return port == other_port and bool(_resolved(host) & _resolved(other_host))


def _resolved(host: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return set()


def _remove_session(path: str) -> None:
    """What Ray wrote while the cluster ran: its logs, which nobody asked for, and sockets that lead nowhere."""
    if not path:
        return
    folder = Path(path)
    shutil.rmtree(folder, ignore_errors=True)
    latest = folder.parent / "session_latest"
    if latest.is_symlink() and not latest.exists():
        latest.unlink(missing_ok=True)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


_CONNECTION = _Connection()
