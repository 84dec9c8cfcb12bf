from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from aexec.executor.ray.health import Ending, exit_status, log_tail, open_pidfd, peer_pidfd, ray_says

DIED = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        (DIED + "Worker exits unexpectedly. Worker exits with an exit code 3.", Ending(3)),
        (
            DIED + "Worker exits with an exit code 1. The process receives a SIGTERM.",
            Ending(1, None, "it was sent SIGTERM"),
        ),
        (DIED + "Worker unexpectedly exits with a connection error code 2. End of file.", Ending()),
        ("The actor is dead because it was killed by `ray.kill`.", Ending(None, None, "ray.kill was called on it")),
        ("... because its placement group was removed.", Ending(None, None, "its placement group was removed")),
        ("The actor is dead because its node has died. Node Id: 7f", Ending(None, None, "its node has died")),
    ],
)
def test_what_ray_says_is_understood(text, ending):
    """Exit codes that were announced to it, and the ends that it had a hand in."""
    assert ray_says(RuntimeError(text)) == ending


def test_who_knows_more_completes_who_knows_less():
    """The kernel has the signal, and Ray the cause."""
    assert Ending(None, "SIGKILL").known_as(Ending(1, None, "ray.kill was called on it")) == Ending(
        None, "SIGKILL", "ray.kill was called on it"
    )
    assert Ending().known_as(Ending(3)) == Ending(3)


@pytest.mark.parametrize(
    ("code", "ending"),
    [("os._exit(7)", Ending(7)), ("os.kill(os.getpid(), 9)", Ending(None, "SIGKILL")), ("pass", Ending(0))],
)
def test_the_kernel_knows_how_a_stranger_ended(code, ending):
    """Of a process that is not our child, and was waited for by its own parent already."""
    parent = f"""
import os, sys
pid = os.fork()
if pid == 0:
    sys.stdin.read()
    {code}
    os._exit(0)
os.close(0)
print(pid, flush=True)
os.waitpid(pid, 0)
"""
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        pidfd = open_pidfd(int(process.stdout.readline()))
        process.communicate()
    try:
        assert select.select([pidfd], [], [], 10.0)[0]
        assert exit_status(pidfd) in {ending, Ending()}  # kernels before 6.15 do not tell
    finally:
        os.close(pidfd)


def test_the_other_end_of_a_socket_is_a_process():
    """By its socket, not by a number, which could mean another one by now."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        pidfd = peer_pidfd(ours)
    try:
        assert f"Pid:\t{os.getpid()}\n" in Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    finally:
        os.close(pidfd)


def test_the_last_lines_of_a_log_are_the_workers_own(tmp_path):
    """From where it began; what Ray's log monitor reads is left out."""
    log = tmp_path / "worker.err"
    log.write_text("of another actor\n:actor_name:rank 0\n" + "".join(f"line {n}\n" for n in range(60)))
    assert log_tail(str(log), len("of another actor\n")).splitlines() == [f"line {n}" for n in range(10, 60)]
    assert log_tail(str(tmp_path / "missing")) == ""


def test_no_process_has_no_descriptor():
    """It has ended, or it was never there."""
    assert open_pidfd(2**22 + 1) == -1
    assert exit_status(-1) == Ending()
