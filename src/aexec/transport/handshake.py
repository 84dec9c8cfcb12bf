"""How two ends of a new line prove to each other that they belong together. Pure.

Both know the secret of their group. Each sends a number that was never used before, and
answers the other's with a keyed digest (HMAC-SHA-256) of all that was said so far; so nothing
that anybody has overheard is of any use, nor can what one end says be said back to it.

::

    worker  HELLO      48 bytes: magic, version, line, rank, a random number
    driver  CHALLENGE  64 bytes: a random number, the digest of "driver" and both
    worker  PROOF      32 bytes: the digest of "worker" and both
    driver  VERDICT     1 byte, see Verdict

All have a fixed size, and nothing of them is ever unpickled. What follows is not encrypted:
whoever can change packets between the two ends can change those as well.
"""

from __future__ import annotations

import enum
import hmac
import secrets
import struct
from typing import Final, Literal, NamedTuple

__all__ = (
    "CHALLENGE_SIZE",
    "HELLO_SIZE",
    "PROOF_SIZE",
    "Caller",
    "Line",
    "Stranger",
    "Verdict",
    "answer_challenge",
    "challenge",
    "check_proof",
    "hello",
    "read_hello",
)

Line = Literal["work", "control"]

_HELLO = struct.Struct("<8sHHI32s")  # magic version line rank random
_MAGIC, _VERSION = b"aexec\0\0\1", 1
_LINES: tuple[Line, ...] = ("work", "control")
_RANDOM, _DIGEST = 32, 32  # bytes

HELLO_SIZE: Final = _HELLO.size
CHALLENGE_SIZE: Final = _RANDOM + _DIGEST
PROOF_SIZE: Final = _DIGEST


class Stranger(Exception):
    """The other end is none of ours; says why."""


class Verdict(enum.IntEnum):
    """What becomes of a worker that has proved whose it is."""

    WELCOME = 1
    TAKEN = 2
    UNKNOWN_RANK = 3


class Caller(NamedTuple):
    """What a hello says.

    Attributes:
        rank: Whose line it wants to be.
        line: Which.
    """

    rank: int
    line: Line


def hello(rank: int, line: Line) -> bytes:
    """What a worker begins with."""
    return _HELLO.pack(_MAGIC, _VERSION, _LINES.index(line), rank, secrets.token_bytes(_RANDOM))


def read_hello(data: bytes) -> Caller:
    """Who a caller says it is.

    Raises:
        Stranger: It is no hello of this version.
    """
    magic, version, line, rank, _ = _HELLO.unpack(data)
    if magic != _MAGIC or line >= len(_LINES):
        raise Stranger(f"it began with {data[:8]!r}, which is no hello")
    if version != _VERSION:
        raise Stranger(f"it speaks version {version} of the handshake, and this end {_VERSION}: install one aexec")
    return Caller(rank, _LINES[line])


def challenge(secret: bytes, said: bytes) -> bytes:
    """The driver's answer to a hello."""
    random = secrets.token_bytes(_RANDOM)
    return random + _digest(secret, b"driver", said + random)


def answer_challenge(secret: bytes, said: bytes, answer: bytes) -> bytes:
    """The worker's proof.

    Args:
        secret: Of the group.
        said: Its own hello.
        answer: The driver's challenge.

    Raises:
        Stranger: Whoever made the challenge does not know the secret.
    """
    random, digest = answer[:_RANDOM], answer[_RANDOM:]
    if not hmac.compare_digest(digest, _digest(secret, b"driver", said + random)):
        raise Stranger("whoever listens there does not know the secret of this group")
    return _digest(secret, b"worker", said + random)


def check_proof(secret: bytes, said: bytes, answer: bytes, proof: bytes) -> None:
    """Believe a worker, or not.

    Args:
        secret: Of the group.
        said: The worker's hello.
        answer: The challenge that it was given.
        proof: What it gave for it.

    Raises:
        Stranger: It does not know the secret.
    """
    if not hmac.compare_digest(proof, _digest(secret, b"worker", said + answer[:_RANDOM])):
        raise Stranger("it does not know the secret of this group")


def _digest(secret: bytes, who: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, b"aexec " + who + b"\0" + said, "sha256")
