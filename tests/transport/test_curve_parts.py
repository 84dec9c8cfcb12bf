from __future__ import annotations

import errno
import os
import subprocess
import sys

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from aexec.errors import ConfigError, MissingExtra
from aexec.transport.curve import NodeKey, check_installed
from aexec.transport.curve.door import Door
from aexec.transport.curve.gate import DOMAIN, networks_of, verdict
from aexec.transport.curve.news import explain
from aexec.transport.curve.pieces import PIECE, Assembly, cut
from aexec.transport.frames import BadFrame

KEY = b"k" * 32


@pytest.fixture(autouse=True)
def no_key_of_this_machine(monkeypatch):
    monkeypatch.delenv("AEXEC_NODE_KEY", raising=False)
    monkeypatch.delenv("AEXEC_NODE_KEY_FILE", raising=False)


# Pieces.


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=20), st.integers(16, 400))
def test_a_frame_in_pieces_is_the_same_frame(parts, piece):
    """Whatever its parts and however small the pieces, it is put together as it was."""
    whole = b"".join(parts)
    if not whole:
        return
    assembly, found = Assembly(), None
    for each in cut(parts, piece):
        assert found is None, "nothing comes after the last piece"
        assert 0 < len(each) <= max(piece, 8)
        found = assembly.add(memoryview(each))
    assert bytes(found) == whole


@pytest.mark.parametrize("size", [1, 100, 20_000, PIECE - 8, PIECE, PIECE + 1, 3 * PIECE + 5])
def test_frames_follow_each_other(size):
    """One assembly takes any number of frames; those with arrays are the receiver's own to write to."""
    assembly = Assembly()
    for byte in (b"a", b"b"):
        parts = [b"head", memoryview(byte * size)]
        pieces = list(cut(parts))
        assert max(map(len, pieces)) <= PIECE
        frames = [assembly.add(memoryview(each)) for each in pieces]
        assert frames[:-1] == [None] * (len(pieces) - 1)
        assert bytes(frames[-1]) == b"head" + byte * size
        assert size < 16_384 or not memoryview(frames[-1]).readonly


def test_long_parts_are_not_copied_before_they_are_asked_for():
    """A piece of a large array is a view of it."""
    array = bytearray(4 * PIECE)
    pieces = cut([b"head", memoryview(array)])
    next(pieces)
    array[0] = 7
    assert next(pieces)[0] == 7


@pytest.mark.parametrize(
    ("pieces", "wrong"),
    [
        ([b"short"], "the length of a frame"),
        ([b"\0" * 8 + b"x"], "claims to have 0 bytes"),
        ([b"\xff" * 8 + b"x"], "claims to have"),
        ([b"\0\0\0\0\xff\0\0\0x"], "no room"),
        ([b"\x05" + b"\0" * 7 + b"abc", b"defg"], "it has 5 bytes, and 7 came"),
    ],
)
def test_what_is_no_piece_is_told(monkeypatch, pieces, wrong):
    """A length that cannot be, or more than was announced: nothing is made of it."""
    monkeypatch.setattr("aexec.transport.curve.pieces.np.empty", limited)
    with pytest.raises(BadFrame, match=wrong):
        add_all(Assembly(), pieces)


def add_all(assembly, pieces):
    for piece in pieces:
        assembly.add(memoryview(piece))


def limited(length, _):
    if length > 1 << 32:
        raise MemoryError
    return np.zeros(length, np.uint8)


# The key.


def test_a_key_that_is_made_can_be_read_by_its_owner_alone(tmp_path):
    """It is in a file of mode 0600, as text, and reading gives the same one."""
    path = tmp_path / "key"
    made = NodeKey.make(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert NodeKey.read(path).secret == made.secret
    assert path.read_text(encoding="ascii").strip() == made.secret.hex()


def test_a_key_is_never_overwritten(tmp_path):
    """Nodes that have the old one would be locked out."""
    path = tmp_path / "key"
    made = NodeKey.make(path)
    with pytest.raises(ConfigError, match="never overwritten"):
        NodeKey.make(path)
    assert NodeKey.read(path).secret == made.secret
    with pytest.raises(ConfigError, match="cannot be made"):
        NodeKey.make(tmp_path / "no" / "such" / "folder")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_key_that_others_can_get_at_is_refused(tmp_path, mode):
    """The error has the command that mends it."""
    path = tmp_path / "key"
    NodeKey.make(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600 {path}"):
        NodeKey.read(path)


@pytest.mark.parametrize("text", ["", "abc", "z" * 64, "a" * 63, "a" * 66])
def test_what_is_no_key_is_not_shown(tmp_path, text):
    """It may be a password of somebody's; the error says what a key looks like."""
    path = tmp_path / "key"
    path.write_text(text, encoding="ascii")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="expected 64 hexadecimal digits") as caught:
        NodeKey.read(path)
    assert not text or text not in str(caught.value)


def test_the_variable_comes_before_the_file_and_the_setting_before_its_variable(monkeypatch, tmp_path):
    """AEXEC_NODE_KEY, then the file that is named, then AEXEC_NODE_KEY_FILE."""
    one, other, third = NodeKey.make(tmp_path / "one"), NodeKey.make(tmp_path / "other"), NodeKey.random()
    monkeypatch.setenv("AEXEC_NODE_KEY_FILE", str(tmp_path / "other"))
    assert NodeKey.find().secret == other.secret
    assert NodeKey.find(tmp_path / "one").secret == one.secret
    monkeypatch.setenv("AEXEC_NODE_KEY", third.secret.hex())
    assert NodeKey.find(tmp_path / "one").secret == third.secret
    monkeypatch.setenv("AEXEC_NODE_KEY", "secret")
    with pytest.raises(ConfigError, match="AEXEC_NODE_KEY holds 6 characters"):
        NodeKey.find()


def test_without_a_key_the_error_has_the_command_that_makes_one(tmp_path):
    """And says where it can be put."""
    with pytest.raises(ConfigError, match=r"aexec worker --make-key FILE.*AEXEC_NODE_KEY_FILE"):
        NodeKey.find()
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        NodeKey.find(tmp_path / "absent")


def test_a_key_is_not_printed():
    """Neither it nor what is made of it shows in a log."""
    key = NodeKey.random()
    assert key.secret.hex() not in repr(key) + str(key)
    assert repr(key.secret)[2:-1] not in repr(key)
    with pytest.raises(ValueError, match="a key of 5 bytes"):
        NodeKey(b"short")


def test_both_sides_make_the_same_keys_of_it_and_strangers_others():
    """The two sides have different ones, and another secret gives other ones."""
    one, same, other = NodeKey(KEY), NodeKey(KEY), NodeKey.random()
    assert one.curve_keys("leader") == same.curve_keys("leader")
    assert len({key.curve_keys(side) for key in (one, other) for side in ("leader", "follower")}) == 4


# The gate.


def question(*, domain=DOMAIN, address=b"10.0.0.7", mechanism=b"CURVE", credentials=(KEY,)):
    return [domain, address, b"", mechanism, *credentials]


@pytest.mark.parametrize(
    ("asked", "allow", "why"),
    [
        (question(), [], ""),
        (question(), ["10.0.0.7"], ""),
        (question(), ["192.168.0.0/16", "10.0.0.0/24"], ""),
        (question(address=b"fe80::1%eth0"), ["fe80::/10"], ""),
        (question(address=b"::ffff:10.0.0.7"), ["10.0.0.0/24"], ""),
        (question(), ["10.0.1.0/24"], "its address is not allowed"),
        (question(address=b"::1"), ["10.0.0.0/24"], "its address is not allowed"),
        (question(address=b"nonsense"), ["10.0.0.0/24"], "its address is not allowed"),
        (question(credentials=[b"x" * 32]), [], "it has another key"),
        (question(credentials=[b""]), [], "it has another key"),
        (question(credentials=[]), [], "it has no key"),
        (question(mechanism=b"NULL", credentials=[]), [], "it has no key"),
        (question(mechanism=b"PLAIN", credentials=[b"user", b"password"]), [], "it has no key"),
        (question(domain=b""), [], "it has no key"),
        ([b"aexec"], [], "the question is none of ZAP's"),
    ],
)
def test_the_gate_lets_in_who_has_the_key_and_an_allowed_address(asked, allow, why):
    """Anything else is refused, with a reason."""
    assert verdict(asked, KEY, networks_of(allow)) == why


def test_an_allow_list_that_is_none_is_an_error():
    """It names the entry."""
    with pytest.raises(ValueError, match=r"'10\.0\.0\.0/33' in the allow-list"):
        networks_of(["10.0.0.1", "10.0.0.0/33"])


# The door.


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "*", "localhost", "10.0.0.0/24"])
def test_only_one_address_is_listened_on(host):
    """No wildcard, and no name that may have several."""
    with pytest.raises(ValueError, match=r"expected (one|an address)"):
        Door(host, 0)


def test_a_port_that_is_taken_or_an_address_of_another_node_is_told():
    """As the system says it; nothing is left open."""
    door = Door("127.0.0.1", 0)
    with pytest.raises(OSError, match="in use"):
        Door(*door.address)
    with pytest.raises(OSError, match="assign"):
        Door("192.0.2.1", 0)
    door.close()


# pyzmq.


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (0, "it said nothing, or too little, in time"),
        (errno.EAGAIN, "it said nothing, or too little, in time"),
        (errno.EINTR, "it said nothing, or too little, in time"),  # this process was stopped, and goes on
        (errno.ECONNRESET, "it broke off (Connection reset by peer)"),
    ],
)
def test_a_handshake_that_comes_to_nothing_says_why(number, why):
    """By the last error that ZMQ has met: at the limit it has none of its own."""
    assert explain(zmq.Event.HANDSHAKE_FAILED_NO_DETAIL, number) == why


def test_without_pyzmq_the_error_has_the_command(monkeypatch):
    """It is an extra."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"pip install 'aexec\[multinode\]'"):
        check_installed()


def test_zmq_is_loaded_by_the_first_line_alone():
    """Neither the transport nor the package of lines loads it, nor a key."""
    program = (
        "import sys, aexec.transport, aexec.transport.curve as curve\n"
        "curve.NodeKey.random(), curve.check_installed()\n"
        "assert 'zmq' not in sys.modules\n"
        "curve.NodeKey.random().curve_keys('leader')\n"
        "assert 'zmq' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=dict(os.environ))
