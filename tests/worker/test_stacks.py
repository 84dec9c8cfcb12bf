from __future__ import annotations

import threading

from aexec.worker.stacks import thread_stack


def wait_inside(event):
    event.wait(10)


def test_a_stack_shows_the_work_of_a_thread_and_not_what_led_to_it():
    """G69: from outside, and without its help."""
    event = threading.Event()
    thread = threading.Thread(target=wait_inside, args=(event,))
    thread.start()
    seen = thread_stack("main", thread.ident, "waiting", ())
    cut = thread_stack("main", thread.ident, "waiting", (__file__,))
    event.set()
    thread.join()
    assert seen.startswith("thread main, in waiting:\n")
    assert "in wait_inside" in seen
    assert cut.startswith("thread main, in waiting:\n")
    assert "in wait_inside" not in cut
    assert "in wait\n" in cut


def test_an_idle_thread_has_nothing_to_show():
    """Nor has one that is not there."""
    assert thread_stack("main", threading.get_ident(), "idle", ()) == "thread main is idle\n"
    assert thread_stack("main", None, "construct", ()) == "thread main is not running\n"
