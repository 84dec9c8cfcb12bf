from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aexec.transport.frames import (
    ALIGNMENT,
    HEADER,
    BadFrame,
    Bulk,
    Kind,
    bulk_layout,
    join,
    pack,
    pack_table,
    parse,
    parse_plain,
    unpack_table,
)  # fmt: skip

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


@given(
    kind=st.sampled_from(Kind),
    call=st.integers(-(2**63), 2**63 - 1),
    codec=st.integers(0, 255),
    body=st.binary(max_size=200),
    num_buffers=st.integers(1, 2**32 - 1),
    long_body=st.booleans(),
    lease=U64,
    bulk=st.builds(Bulk, U32, U64, U64),
    releases=st.lists(U64, max_size=20),
)
def test_a_frame_comes_apart_as_it_was_made(kind, call, codec, body, num_buffers, long_body, lease, bulk, releases):
    """Every field of it, whatever the others are."""
    options = {"long_body": long_body, "lease": lease, "num_buffers": num_buffers, "releases": releases}
    head = parse(pack(kind, call, codec, body, bulk=bulk, **options))
    assert head == (kind, call, codec, body, long_body, num_buffers, lease, bulk, None, tuple(releases))
    head = parse(pack(kind, call, codec, body, releases=releases))
    assert (head.kind, head.call, head.codec, head.body, head.releases) == (kind, call, codec, body, tuple(releases))
    assert (head.num_buffers, head.bulk, head.trailer) == (0, None, None)


@given(body=st.binary(max_size=200), releases=st.lists(U64, max_size=5), trailer=st.binary(max_size=300))
def test_a_trailer_begins_where_any_dtype_may(body, releases, trailer):
    """At a multiple of the alignment, behind body and releases."""
    frame = pack(Kind.MESSAGE, 1, 1, body, num_buffers=1, releases=releases) + trailer
    head = parse(frame)
    assert bytes(head.trailer) == trailer
    assert (len(frame) - len(trailer)) % ALIGNMENT == 0
    assert head.body == body


@given(st.binary(max_size=200), st.integers(0, 255))
def test_bytes_that_are_no_frame_are_refused_as_such(data, kind):
    """Whatever they are, the only error is the one that says so."""
    for garbage in (data, HEADER.pack(0xAE1C, 1, kind, 0, data[0] if data else 0, 3, 7, 2, 0, 0) + data):
        with contextlib.suppress(BadFrame):
            assert parse(garbage).kind in Kind


@pytest.mark.parametrize("number", [0, 6, 10, 255])
def test_a_kind_that_nobody_sends_is_no_frame(number):
    """No receiver has anything to do with it."""
    with pytest.raises(BadFrame, match="and a kind"):
        parse(pack(number, 0))


@pytest.mark.parametrize("cut", [0, 1, 31, 33, 60])
def test_a_frame_that_was_cut_is_none(cut):
    """Nothing is read past its end."""
    frame = pack(Kind.MESSAGE, 1, 1, b"body", num_buffers=1, bulk=Bulk(1, 2, 3), releases=[4, 5])
    with pytest.raises(BadFrame):
        parse(frame[:cut])


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=20))
def test_buffers_lie_apart_and_aligned(lengths):
    """None overlaps the table or another; the table tells where each is."""
    offsets, end = bulk_layout(lengths)
    edge = 8 * len(lengths)
    for offset, length in zip(offsets, lengths, strict=True):
        assert offset >= edge
        assert offset % ALIGNMENT == 0
        edge = offset + length
    assert edge == end
    bulk = pack_table(lengths).ljust(end, b"\0")
    assert unpack_table(bulk, len(lengths)) == list(zip(offsets, lengths, strict=True))
    if lengths[-1]:
        with pytest.raises(BadFrame, match="there are"):
            unpack_table(bulk[:-1], len(lengths))


def test_a_table_that_is_not_there_is_refused():
    """A number of buffers that the bulk has no room for is garbage."""
    with pytest.raises(BadFrame, match="5 buffers are announced in 16 bytes"):
        unpack_table(bytes(16), 5)


@given(
    kind=st.sampled_from(sorted(set(Kind) - {Kind.RELEASE, Kind.SEGMENT})),
    call=st.integers(-(2**63), 2**63 - 1),
    codec=st.integers(0, 255),
    body=st.binary(max_size=200),
)
def test_a_plain_frame_is_read_the_short_way(kind, call, codec, body):
    """It says the same as the long one."""
    frame = pack(kind, call, codec, body)
    head = parse(frame)
    assert parse_plain(frame) == (head.kind, head.call, head.codec, head.body, None)


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 255), st.binary(max_size=200)), min_size=1))
def test_frames_that_were_joined_come_apart_in_order(content):
    """Each as if it had come alone, however many there are."""
    data = None
    for call, codec, body in reversed(content):
        frame = pack(Kind.MESSAGE, call, codec, body)
        data = frame if data is None else join(frame, data)
    rest, found = data, []
    while rest is not None:
        kind, call, codec, body, rest = parse_plain(rest)
        assert kind is Kind.MESSAGE
        found.append((call, codec, bytes(body)))
    assert found == content


@given(st.integers(1, 40))
def test_a_frame_that_has_lost_the_one_behind_it_is_none(cut):
    """It says that there is one, or that it is longer than it is."""
    frame = pack(Kind.MESSAGE, 1, 2, b"12345678")
    with pytest.raises(BadFrame):
        parse(join(frame, b"")[:-cut])
    with pytest.raises(BadFrame):
        parse(join(frame, b""))
    assert parse_plain(join(frame, b"")) is None


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        pack(Kind.REPLY, 1, 2, b"body")[:-1],
        pack(Kind.REPLY, 1, 2, b"body") + b"more",
        b"\0" + pack(Kind.REPLY, 1, 2, b"body")[1:],
        pack(Kind.REPLY, 1, 2, b"body", releases=[7]),
        pack(Kind.REPLY, 1, 2, b"body", num_buffers=1, lease=3, bulk=Bulk(1, 2, 3)),
        pack(Kind.REPLY, 1, 2, b"body", num_buffers=1),
        pack(Kind.REPLY, 1, 2, b"", num_buffers=1, long_body=True, bulk=Bulk(1, 2, 3)),
        pack(Kind.RELEASE, 0),
        pack(Kind.SEGMENT, 1, 0, b"12345678"),
    ],
)
def test_any_other_frame_is_left_to_the_long_way(frame):
    """Be it whole or not."""
    assert parse_plain(frame) is None
