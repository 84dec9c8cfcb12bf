"""Two network namespaces on one bridge, and a node of a Ray cluster in each. Needs root.

Unlike two addresses of loopback they are as separate as two machines where networks are
concerned: 127.0.0.1 and names of Unix sockets lead nowhere but to themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PATIENCE = 60.0
GRACE = 10.0
OBJECT_STORE = 100 << 20  # bytes
CPUS = {"near": 4, "far": 2}
RAY = Path(sys.executable).with_name("ray")


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=PATIENCE)


def within(namespace, *command):
    """A command that runs there."""
    return ["ip", "netns", "exec", namespace, *command]


@contextlib.contextmanager
def namespaces():
    """Two of them, by name, each with its address; no packet leaves their bridge."""
    label, network = f"ax{os.getpid() % 100_000}", f"10.231.{os.getpid() % 250}"
    with contextlib.ExitStack() as undo:
        bridge = f"{label}br"
        _ip("link", "add", bridge, "type", "bridge")
        undo.callback(_ip, "link", "del", bridge)
        _ip("addr", "add", f"{network}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        made = {}
        for number in (1, 2):
            name, outer = f"{label}n{number}", f"{label}v{number}"
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "del", name)
            _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
            undo.callback(_ip, "link", "del", outer)  # and its other end with it
            _ip("link", "set", outer, "master", bridge, "up")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
            _ip("-n", name, "addr", "add", f"{network}.{number}/24", "dev", "eth0")
            _ip("-n", name, "route", "add", "default", "via", f"{network}.254")  # Ray asks which way leads out
            made[name] = f"{network}.{number}"
        yield made


@contextlib.contextmanager
def cluster(environment):
    """A first node: its address, what starts a second one, and what to put before a command that is to run beside it.

    What runs in the namespaces at the end is killed, as what is left after the death of a node.
    """
    with namespaces() as made:
        (near, near_ip), (far, far_ip) = made.items()
        address = f"{near_ip}:6399"
        head = ("--head", "--port=6399", "--include-dashboard=false", f"--temp-dir={environment['RAY_TMPDIR']}")
        with subprocess.Popen(
            _node(near, near_ip, "near", *head),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                _wait_for(near, address)
                yield address, _node(far, far_ip, "far", f"--address={address}"), within(near)
            finally:
                process.terminate()  # it drains, and ends what it has started
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
                _end_all(near)
                _end_all(far)


def _node(namespace, ip, resource, *options):
    return within(
        namespace, str(RAY), "start", f"--node-ip-address={ip}", f"--num-cpus={CPUS[resource]}",
        f"--resources={json.dumps({resource: 4})}", f"--object-store-memory={OBJECT_STORE}", "--block", *options,
    )  # fmt: skip


def _end_all(namespace):
    pids = subprocess.run(["ip", "netns", "pids", namespace], check=True, capture_output=True, text=True).stdout
    for pid in pids.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _wait_for(namespace, address):
    """Until the first node answers, as seen from its own namespace."""
    host, _, port = address.partition(":")
    attempt = f"import socket; socket.create_connection(({host!r}, {port}), 1).close()"
    give_up = time.monotonic() + PATIENCE
    while subprocess.run(within(namespace, sys.executable, "-c", attempt), check=False, capture_output=True).returncode:
        assert time.monotonic() < give_up, f"no Ray at {address} in {namespace}"
        time.sleep(0.1)
