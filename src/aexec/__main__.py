"""The console script ``aexec``, also ``python -m aexec``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from aexec.errors import MissingExtra

__all__ = ("main", "run")


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code.

    Without the extra ``cli`` there is still ``aexec doctor``, which says what to install.
    """
    try:
        from aexec.cli.app import run as run_app
    except ModuleNotFoundError as missing:
        if missing.name not in {"cyclopts", "rich"}:
            raise
        if list(arguments) == ["doctor"]:
            from aexec.cli.doctor import report

            print(report())
            return 0
        print(f"aexec: {MissingExtra('the command line', 'cli', missing.name)}", file=sys.stderr)
        return 2
    return run_app(arguments)


def main() -> None:
    """Run the command line with this process's arguments."""
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # while it is being imported: a command that runs says so itself
        print("aexec: stopped", file=sys.stderr)
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
