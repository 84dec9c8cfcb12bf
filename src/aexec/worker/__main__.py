"""``python -m aexec.worker <fd>``: a worker process, started by an executor; see ``aexec.messages.process``."""

from __future__ import annotations

import sys

from aexec.worker.process import serve

if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[-1])))  # what stands before it is for those who read `ps`
