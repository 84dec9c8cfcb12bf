"""torchrun, for tests of what ranks say that somebody else has started."""

from __future__ import annotations

import launched
import pytest

SECONDS = 90  # on two busy cores; four ranks that load torch take 15 when nobody else works


@pytest.fixture(scope="session")
def torchrun(tmp_path_factory):
    """Run a program in so many processes of torchrun's; what they printed, once all have ended well."""

    def run(num_ranks, program, *arguments):
        launcher = launched.torchrun(
            program, *map(str, arguments), ranks=num_ranks, logs=tmp_path_factory.mktemp("log")
        )
        try:
            out, err = launcher.communicate(timeout=SECONDS)
        finally:
            launched.end_session(launcher)
        assert launcher.returncode == 0, err[-8000:]
        return out

    return run
