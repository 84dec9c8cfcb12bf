"""What is set for a compilation, without Ray."""

from __future__ import annotations

from types import SimpleNamespace

from aexec.executor.ray.graph.build import BufferSize


def test_the_size_of_buffers_is_put_back():
    """It is the program's own setting."""
    context, sizes = SimpleNamespace(buffer_size_bytes=7), BufferSize()
    with sizes.at_least(context, 100):
        assert context.buffer_size_bytes == 100
    assert context.buffer_size_bytes == 7


def test_compilations_at_the_same_time_get_what_the_largest_wants():
    """In whatever order they end; none waits for another."""
    context, sizes = SimpleNamespace(buffer_size_bytes=7), BufferSize()
    small, large = sizes.at_least(context, 100), sizes.at_least(context, 200)
    small.__enter__()
    large.__enter__()
    assert context.buffer_size_bytes == 200
    small.__exit__(None, None, None)
    assert context.buffer_size_bytes == 200
    large.__exit__(None, None, None)
    assert context.buffer_size_bytes == 7
