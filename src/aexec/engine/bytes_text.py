"""A tokenizer without files or dependencies: a token is a byte. For the ``dummy`` model."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence

from aexec.engine.chat import check_messages
from aexec.engine.text import TokenDecoder

__all__ = ("ByteTokenizer",)

_NUM_ASCII, _NUM_BYTES = 128, 256


class ByteTokenizer:
    """Token ids 0 to 255 are the bytes of UTF-8; whatever is above has no text."""

    @property
    def vocab_size(self) -> int:
        """256."""
        return _NUM_BYTES

    def encode(self, text: str) -> list[int]:
        """The bytes of ``text``."""
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the bytes among ``token_ids``; there are no special texts to skip."""
        del skip_special_tokens
        return bytes(token_id for token_id in token_ids if token_id < _NUM_BYTES).decode(errors="replace")

    def decoder(self, prompt: Sequence[int], *, skip_special_tokens: bool) -> TokenDecoder:
        """A decoder that waits for the last byte of each character."""
        del prompt, skip_special_tokens
        return _ByteDecoder()

    def to_json(self) -> None:
        """It has no file: token ids 0 to 255 are bytes."""

    def chat_prompt(self, messages: Sequence[Mapping[str, object]]) -> str:
        """``role: content`` lines, then ``assistant:``."""
        check_messages(messages)
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant:"


class _ByteDecoder:
    __slots__ = ("_decoder", "_is_incomplete")

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_incomplete = False

    def step(self, token_id: int) -> str:
        """The character that this byte completes."""
        if token_id < _NUM_ASCII and not self._is_incomplete:
            return chr(token_id)
        if token_id >= _NUM_BYTES:
            return ""
        text = self._decoder.decode(bytes((token_id,)))
        self._is_incomplete = bool(self._decoder.getstate()[0])
        return text
