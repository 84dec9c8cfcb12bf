"""``aexec worker``: its options, what it says, and how it ends before there is a leader."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from aexec.cli.app import run
from aexec.cli.interrupts import Interrupts
from aexec.cli.worker import WorkerOptions
from aexec.errors import ConfigError

FINE = {"nnodes": 2, "node_rank": 1, "master_addr": "127.0.0.1"}


def test_what_is_missing_is_named_with_an_example(capsys):
    """Somebody who tries the command without anything learns what it wants."""
    assert run(["worker"]) == 2
    assert "--nnodes, --node-rank, --master-addr missing: as in `aexec worker --nnodes 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"node_rank": 0}, "node 0 runs the program that opens the executor"),
        ({"node_rank": 2}, "expected 1 to nnodes - 1"),
        ({"master_port": 0}, "expected the port that node 0 says it listens on"),
        ({"master_port": 70_000}, "--master-port is 70000"),
        ({"join_timeout": 0.0}, "--join-timeout is 0: expected a positive number"),
        ({"node_timeout": float("nan")}, "--node-timeout is nan: expected a positive number"),
        ({"master_addr": "0.0.0.0"}, "--master-addr is '0.0.0.0', which is every address of a machine"),
        ({"master_addr": "::"}, "expected the one of node 0"),
        ({"host_ip": "192.0.2.77"}, "--host-ip is '192.0.2.77', which is no address of this machine"),
        ({"host_ip": "second"}, "--host-ip is 'second', which is no address of this machine"),
        ({"interface": "no-such-0"}, "--interface is 'no-such-0', which has no address here: expected one of .*lo"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_expected(changes, said):
    """Before anything is dialled."""
    with pytest.raises(ConfigError, match=said):
        WorkerOptions(**FINE | changes).checked()


def test_the_address_of_this_node_is_the_options_or_the_interfaces(monkeypatch):
    """First what the option says, then AEXEC_HOST_IP, then the interface."""
    assert WorkerOptions(**FINE, interface="lo").checked().address == "127.0.0.1"
    monkeypatch.setenv("AEXEC_HOST_IP", "127.0.0.9")
    assert WorkerOptions(**FINE, interface="lo").checked().address == "127.0.0.9"
    assert WorkerOptions(**FINE, host_ip="127.0.0.8").checked().address == "127.0.0.8"
    monkeypatch.setenv("AEXEC_HOST_IP", "192.0.2.77")
    with pytest.raises(ConfigError, match=r"AEXEC_HOST_IP is '192\.0\.2\.77', which is no address of this machine"):
        WorkerOptions(**FINE).checked()


def test_a_key_is_made_for_its_owner_alone(tmp_path, capsys):
    """With what to do next; and never over another one."""
    path = tmp_path / "nodes.key"
    assert run(["worker", "--make-key", str(path)]) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "copy it to each node" in capsys.readouterr().err
    before = path.read_bytes()
    assert run(["worker", "--make-key", str(path)]) == 2
    assert path.read_bytes() == before


def test_a_key_that_others_can_read_is_refused(tmp_path, capsys):
    """With the command that mends it."""
    path = tmp_path / "nodes.key"
    run(["worker", "--make-key", str(path)])
    path.chmod(0o640)
    words = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--key-file", str(path)]
    assert run(["worker", *words]) == 2
    assert f"chmod 600 {path}" in capsys.readouterr().err


def test_no_leader_in_time_is_a_failure(tmp_path, capsys):
    """With where it was looked for, for how long, and what came of it."""
    path = tmp_path / "nodes.key"
    run(["worker", "--make-key", str(path)])
    words = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--key-file", str(path)]
    assert run(["worker", *words, "--master-port", "1", "--join-timeout", "0.5"]) == 1
    said = capsys.readouterr().err
    assert "is waiting for the leader at 127.0.0.1:1, 0.5 s at most" in said
    assert "no leader has answered at" in said


@pytest.mark.parametrize(("number", "word", "code"), [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143)])
def test_a_signal_ends_the_wait_for_a_leader(tmp_path, number, word, code):
    """G19: at once, with one line and the code that shells expect."""
    path = tmp_path / "nodes.key"
    run(["worker", "--make-key", str(path)])
    command = [sys.executable, "-m", "aexec", "worker", "--nnodes", "2", "--node-rank", "1"]
    with subprocess.Popen(
        [*command, "--master-addr", "127.0.0.1", "--master-port", "1", "--key-file", str(path)],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert "waiting for the leader" in process.stderr.readline()
        process.send_signal(number)
        said = process.stderr.read()
        assert process.wait(10.0) == code
    assert f"aexec worker: {word}: ended before the leader was there" in said
    assert "Traceback" not in said


@pytest.mark.anyio
async def test_work_that_ends_first_has_its_value():
    """Without a signal the wait is for the work alone, errors too."""

    async def fail():
        raise ValueError("no")

    with Interrupts() as interrupts:
        assert await interrupts.unless(asyncio.sleep(0, "done")) == "done"
        with pytest.raises(ValueError, match="no"):
            await interrupts.unless(fail())


@pytest.mark.anyio
async def test_a_signal_cancels_the_work():
    """And the code says which signal it was."""
    with Interrupts() as interrupts:
        waiting = asyncio.ensure_future(interrupts.unless(asyncio.sleep(60)))
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await waiting is None
        assert (interrupts.name, interrupts.exit_code) == ("SIGTERM", 143)
        assert await interrupts.unless(asyncio.sleep(60)) is None


def test_a_node_whose_words_nobody_can_read_goes_on(tmp_path):
    """A log that is full, or whose reader has ended, is no reason for its ranks to end."""
    path = tmp_path / "nodes.key"
    run(["worker", "--make-key", str(path)])
    words = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--key-file", str(path)]
    words += ["--master-port", "1", "--join-timeout", "30"]
    with Path("/dev/full").open("w") as full:
        node = subprocess.Popen([sys.executable, "-m", "aexec", "worker", *words], stderr=full)
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                node.wait(timeout=3.0)
        finally:
            node.kill()
            node.wait()
