from __future__ import annotations

from importlib.util import find_spec

# Both checkers come with the `types` session; the `tests` session does without them.
collect_ignore = [] if find_spec("mypy") and find_spec("pyright") else ["test_rejects.py"]
