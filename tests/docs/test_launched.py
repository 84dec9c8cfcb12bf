"""The manual's programs that take more than one process of the reader's: torch's launcher, or a second node."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched import end_session, torchrun
from manual import ROOT, found, run

from aexec.parallel.rendezvous import PortReservation
from aexec.transport.curve import NodeKey

PATIENCE = 50.0


@pytest.mark.parametrize(("program", "output"), found("torchrun"))
def test_a_program_for_torchrun_runs(program: str, output: str, tmp_path: Path) -> None:
    """Two ranks run it, and it prints what the page says."""
    script = tmp_path / "page.py"
    script.write_text(program, encoding="utf-8")
    launcher = torchrun(script, logs=tmp_path, cwd=ROOT)
    try:
        said, errors = launcher.communicate(timeout=PATIENCE)
    finally:
        end_session(launcher)
    assert (launcher.returncode, said) == (0, output), errors


@pytest.mark.parametrize(("program", "output"), found("nodes"))
def test_a_program_for_two_nodes_runs(program: str, output: str, tmp_path: Path) -> None:
    """The agent that the page starts on the other machine is started here, and ends by itself."""
    NodeKey.make(tmp_path / "nodes.key")
    port = PortReservation("127.0.0.1")
    program = program.replace("nnodes=2", f"nnodes=2, master_port={port.port}")
    env = {**os.environ, "AEXEC_NODE_KEY_FILE": str(tmp_path / "nodes.key")}
    place = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", str(port.port)]
    agent = subprocess.Popen([sys.executable, "-m", "aexec", "worker", *place], env=env)
    try:
        assert run("-c", program, env=env) == output
        assert agent.wait(PATIENCE) == 0
    finally:
        agent.kill()
        agent.wait()
        port.close()  # nobody else was given it meanwhile
