"""Text in, text out: what a tokenizer must do, and the text side of one request.

New tokens become text as they come. Two things are held back: the bytes of a character
until the character is whole, and whatever may turn out to be the beginning of a stop
text, so that no part of one is ever shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

__all__ = ("RequestText", "StopTexts", "TextDelta", "TokenDecoder", "Tokenizer")


class TokenDecoder(Protocol):
    """Turns the tokens of one request into text, one by one."""

    def step(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty while a character is incomplete."""
        ...


class Tokenizer(Protocol):
    """A model's tokenizer. Its methods are quick or called off the loop, and change nothing."""

    @property
    def vocab_size(self) -> int:
        """Tokens that it knows, added ones among them."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, the special tokens that the model expects around it included."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of whole token sequences."""
        ...

    def decoder(self, prompt: Sequence[int], *, skip_special_tokens: bool) -> TokenDecoder:
        """A decoder of what follows ``prompt``."""
        ...

    def to_json(self) -> str | None:
        """The text of its ``tokenizer.json``, for grammar libraries; None: token ids 0 to 255 are bytes. Blocks."""
        ...

    def chat_prompt(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The prompt of a conversation, up to where the assistant answers.

        Raises:
            InvalidRequest: The model has no chat template, or it refuses the messages.
        """
        ...


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """New text, and the stop text that was found after it, if one was."""

    text: str
    stop: str | None = None


_NO_TEXT = TextDelta("")


class StopTexts:
    """Looks for texts that end a request in text that comes in pieces.

    >>> stops = StopTexts(("END",))
    >>> stops.feed("one E"), stops.feed("ach EN"), stops.feed("D and more")
    (TextDelta(text='one ', stop=None), TextDelta(text='Each ', stop=None), TextDelta(text='', stop='END'))
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> TextDelta:
        """Take a piece; returns what surely belongs to the request."""
        self._held += text
        found = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            place, stop = min(found, key=_place)
            shown, self._held = self._held[:place], ""
            return TextDelta(shown, stop)
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return TextDelta(shown)

    def flush(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held


class RequestText:
    """The text of one request's output.

    Args:
        decoder: Of the request's tokens; None: the engine has no tokenizer, and the text is empty.
        stops: Texts that end it.
        min_tokens: Stop texts are not looked for in the first so many tokens.
    """

    __slots__ = ("_decoder", "_num_free_tokens", "_stops")

    def __init__(self, decoder: TokenDecoder | None, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._decoder = decoder
        self._stops = StopTexts(stops) if stops else None
        self._num_free_tokens = min_tokens

    def feed(self, token_ids: Sequence[int]) -> TextDelta:
        """Take new tokens, up to the one that completes a stop text."""
        if self._decoder is None:
            return _NO_TEXT
        if self._stops is None:
            step = self._decoder.step
            return TextDelta(step(token_ids[0]) if len(token_ids) == 1 else "".join(map(step, token_ids)))
        text = ""
        for token_id in token_ids:
            delta = self._search(self._stops, self._decoder.step(token_id))
            text += delta.text
            if delta.stop is not None:
                return TextDelta(text, delta.stop)
        return TextDelta(text)

    def flush(self) -> str:
        """What was held back for a stop text that never came; half a character is dropped."""
        return self._stops.flush() if self._stops is not None else ""

    def _search(self, stops: StopTexts, text: str) -> TextDelta:
        if self._num_free_tokens > 0:
            self._num_free_tokens -= 1
            return TextDelta(text)
        return stops.feed(text)


def _place(found: tuple[int, str]) -> int:
    return found[0]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
