"""torchrun, for tests of what ranks say that somebody else has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from aexec.testing.processes import ProcessWatch, descendants

SECONDS = 90  # on two busy cores; four ranks that load torch take 15 when nobody else works


@pytest.fixture(scope="session")
def torchrun(tmp_path_factory):
    """Run a program in so many processes of torchrun's; what they printed, once all have ended well and nobody is left."""

    def run(num_ranks, *arguments):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        command += ["--log-dir", str(tmp_path_factory.mktemp("log"))]  # its own stays in /tmp
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
        process = subprocess.Popen(
            [*command, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        try:
            out, err = process.communicate(timeout=SECONDS)
        except BaseException:
            _end_all(process)
            raise
        assert process.returncode == 0, err[-8000:]
        return out

    return run


def _end_all(process):
    """Each rank is in a session of its own: torchrun sees to that."""
    ours = [*descendants(process.pid), process.pid]
    with ProcessWatch(ours) as watch:
        for pid in ours:
            os.kill(pid, signal.SIGKILL)
        process.communicate()
        assert watch.alive(5.0) == []
