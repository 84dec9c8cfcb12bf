"""The key that all nodes of an executor share, and that nobody else has."""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from aexec import environ
from aexec.errors import ConfigError

__all__ = ("NodeKey",)

_SIZE: Final = 32  # bytes
_TEXT = re.compile(r"[0-9a-fA-F]{64}")
_MAKE: Final = "aexec worker --make-key FILE"

Side = Literal["leader", "follower"]


@dataclass(frozen=True, slots=True)
class NodeKey:
    """32 bytes, from which either side's CURVE keys are made.

    As text, in a file or a variable, it is 64 hexadecimal digits.

    Attributes:
        secret: The bytes.
        source: Where they come from, for people.
    """

    secret: bytes = field(repr=False)
    source: str = "made here"

    def __post_init__(self) -> None:
        if len(self.secret) != _SIZE:
            raise ValueError(f"a key of {len(self.secret)} bytes: expected {_SIZE}, as NodeKey.make() writes them")

    @classmethod
    def random(cls) -> NodeKey:
        """A new one."""
        return cls(secrets.token_bytes(_SIZE))

    @classmethod
    def make(cls, path: str | os.PathLike[str]) -> NodeKey:
        """Write a new one into a new file that only its owner can read.

        Raises:
            ConfigError: There is such a file already, or it cannot be written.
        """
        where, key = Path(path), cls(secrets.token_bytes(_SIZE), str(path))
        try:
            descriptor = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError as error:
            raise ConfigError(f"{str(path)!r} exists, and a key is never overwritten: take another name") from error
        except OSError as error:
            raise ConfigError(f"the key file {str(path)!r} cannot be made: {error.strerror or error}") from error
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{key.secret.hex()}\n")
        return key

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> NodeKey:
        """Read one that :meth:`make` has written, here or on another node.

        Raises:
            ConfigError: It cannot be read, others can read it, or it is no key.
        """
        where = Path(path)
        try:
            with where.open(encoding="ascii", errors="replace") as file:
                mode = os.fstat(file.fileno()).st_mode
                text = file.read(1024)
        except OSError as error:
            raise ConfigError(
                f"the key file {str(path)!r} cannot be read: {error.strerror or error}; {_MAKE} makes one"
            ) from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"the key file {str(path)!r} has mode {stat.S_IMODE(mode):04o}, and others than its owner can get at "
                f"it: chmod 600 {path}; if others may have read it, make another one"
            )
        return cls._of_text(text, str(path), f"the key file {str(path)!r}")

    @classmethod
    def find(cls, file: str | os.PathLike[str] | None = None) -> NodeKey:
        """The key of this node: of ``AEXEC_NODE_KEY``, else of ``file``, else of ``AEXEC_NODE_KEY_FILE``.

        Raises:
            ConfigError: There is none, or it is not one.
        """
        if environ.NODE_KEY.is_set():
            return cls._of_text(environ.NODE_KEY.read(), environ.NODE_KEY.name, environ.NODE_KEY.name)
        where = file or environ.NODE_KEY_FILE.read()
        if where:
            return cls.read(where)
        raise ConfigError(
            "several nodes need a key that all of them have, and there is none: make one with "
            f"`{_MAKE}`, copy the file to every node, and name it there by node_key_file, --key-file or "
            f"{environ.NODE_KEY_FILE.name}; or put its content into {environ.NODE_KEY.name}"
        )

    @classmethod
    def _of_text(cls, text: str, source: str, what: str) -> NodeKey:
        digits = text.strip()
        if not _TEXT.fullmatch(digits):  # what it holds is not shown: it may be a key after all
            raise ConfigError(f"{what} holds {len(digits)} characters: expected 64 hexadecimal digits; {_MAKE}")
        return cls(bytes.fromhex(digits), source)

    def __str__(self) -> str:
        return f"key from {self.source}"

    def curve_keys(self, side: Side) -> tuple[bytes, bytes]:
        """Public and secret key of one side, as ZMQ writes them; the same on every node."""
        from zmq import curve_public
        from zmq.utils import z85

        secret = z85.encode(hmac.digest(self.secret, f"aexec node link 1: {side}".encode(), "sha256"))
        return curve_public(secret), secret
