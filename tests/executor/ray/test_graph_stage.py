"""The graph's part of a worker actor, without Ray."""

from __future__ import annotations

import os
import threading

from aexec.executor.ray.graph.stage import GraphStage
from aexec.worker.roads import WAKE


def test_the_graphs_thread_makes_way_once_however_often_the_graph_is_built():
    """Each graph wakes it up anew: it would end with no share of a busy processor at all."""
    seen = []

    def run():
        stage = GraphStage()
        for _ in range(3):
            assert stage.graph_step(WAKE) is None
            seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    own = os.getpriority(os.PRIO_PROCESS, os.getpid())
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [min(own + 10, 19)] * 3
    assert os.getpriority(os.PRIO_PROCESS, os.getpid()) == own
