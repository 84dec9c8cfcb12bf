"""A process that somebody else has made, as a cluster does: it dials its driver, and is a worker then.

``python foreign_process.py PLACE THREAD [ROAD]``: the thread to serve on is ``main`` or ``other``.
"""

from __future__ import annotations

import dataclasses
import pickle
import signal
import sys
import threading

from aexec.transport.meeting import dial
from aexec.worker.process import serve_lines


class CountingRoad:
    """Stands for the work line; every frame of it comes this way."""

    def __init__(self, line, rank):
        self._line, self._rank = line, rank
        self.taken = 0

    def receive(self):
        frame = self._line.receive()
        self.taken += frame is not None
        return frame

    def send(self, kind, call, value=None, /):
        self._line.send(kind, call, (self.taken, value) if isinstance(value, str) else value)


def serve(place, road):
    """Be rank 0 until the driver says otherwise."""
    ends = [dial(place, 0, line, 20.0) for line in ("work", "control")]
    if not road:
        return serve_lines(*ends)
    return serve_lines(
        *ends, make_road=CountingRoad, complete=lambda context: dataclasses.replace(context, node_id="completed")
    )


def main():
    """Whoever has made the process has signal handlers and a path of his own, and lives on afterwards."""
    place, thread, *road = sys.argv[1:]
    sys.path.append("/of/its/own")
    signal.signal(signal.SIGTERM, lambda *_: sys.stderr.write("handled by whoever made it\n"))
    code = []

    def run():
        code.append(serve(pickle.loads(bytes.fromhex(place)), road))

    if thread == "main":
        run()
    else:
        other = threading.Thread(target=run)
        other.start()
        other.join()
    sys.stderr.write(f"served: {code}\n")
    sys.exit(code[0])


if __name__ == "__main__":
    main()
