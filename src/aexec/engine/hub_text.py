"""The tokenizer of a model directory in Hugging Face's layout, by the ``tokenizers`` library.

Everything that reads files is for a thread; a directory without ``tokenizer.json`` is
fine, and then the engine speaks token ids only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from aexec.engine.chat import ChatTemplate
from aexec.engine.text import TokenDecoder
from aexec.errors import InvalidRequest, MissingExtra, ModelLoadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Tokens

__all__ = ("HubTokenizer", "load_tokenizer", "read_eos_token_ids")

# Tokens of the prompt that the first new token is decoded after: enough for its leading space.
_NUM_CONTEXT_TOKENS = 6
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class HubTokenizer:
    """A ``tokenizer.json``, and what ``tokenizer_config.json`` adds to it.

    Args:
        tokens: The loaded tokenizer.
        special_tokens: Texts of special tokens by name, as ``bos_token``.
        chat_template: The model's, if it has one.
        path: Where ``tokens`` was read from.
    """

    def __init__(
        self,
        tokens: Tokens,
        special_tokens: Mapping[str, str],
        chat_template: ChatTemplate | None,
        path: Path | None = None,
    ) -> None:
        self._tokens, self._chat_template, self._path = tokens, chat_template, path
        self._bos_text = special_tokens.get("bos_token", "")

    @property
    def vocab_size(self) -> int:
        """Tokens that it knows, added ones among them."""
        return self._tokens.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt; a text that brings its own begin-of-text token gets no second one."""
        bare = bool(self._bos_text) and text.startswith(self._bos_text)
        return self._tokens.encode(text, add_special_tokens=not bare).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of whole token sequences."""
        return self._tokens.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def decoder(self, prompt: Sequence[int], *, skip_special_tokens: bool) -> TokenDecoder:
        """A decoder of what follows ``prompt``."""
        return _HubDecoder(self._tokens, prompt, skip_special_tokens=skip_special_tokens)

    def to_json(self) -> str:
        """The text of its ``tokenizer.json``: of the file, as the library lets no other thread run while it writes."""
        return self._tokens.to_str() if self._path is None else self._path.read_text(encoding="utf-8")

    def chat_prompt(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The prompt of a conversation, by the model's own template.

        Raises:
            InvalidRequest: The model has no template, or it refuses the messages.
        """
        if self._chat_template is None:
            raise InvalidRequest(
                "this model has no chat template: pass a plain prompt, or add chat_template.jinja to its directory"
            )
        return self._chat_template.render(messages)

    def __repr__(self) -> str:
        chat = "with" if self._chat_template is not None else "without"
        return f"<HubTokenizer: {self.vocab_size} tokens, {chat} chat template>"


class _HubDecoder:
    __slots__ = ("_skip", "_stream", "_tokens")

    def __init__(self, tokens: Tokens, prompt: Sequence[int], *, skip_special_tokens: bool) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokens, self._skip = tokens, skip_special_tokens
        context = list(prompt[-_NUM_CONTEXT_TOKENS:])
        if tokens.decode(context, skip_special_tokens=skip_special_tokens).endswith(_INCOMPLETE):
            context = []  # the stream would say the end of the prompt again
        self._stream = DecodeStream(ids=context, skip_special_tokens=skip_special_tokens)

    def step(self, token_id: int) -> str:
        """The text that this token completes."""
        try:
            return self._stream.step(self._tokens, token_id) or ""
        except Exception:  # noqa: BLE001  # the library has no type of its own for "not a continuation"
            return self._start_over(token_id)

    def _start_over(self, token_id: int) -> str:
        """Go on from here: some decoders rewrite text that was given out (bytes that are no UTF-8)."""
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(skip_special_tokens=self._skip)
        return self._stream.step(self._tokens, token_id) or ""


def load_tokenizer(directory: Path) -> HubTokenizer | None:
    """The tokenizer of a model directory; None when it has no ``tokenizer.json``. Blocks.

    Raises:
        MissingExtra: The ``tokenizers`` library is not installed.
        ModelLoadError: A file is damaged.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        from tokenizers import Tokenizer as Tokens
    except ImportError:
        raise MissingExtra("the tokenizer of a model", "models", "tokenizers") from None
    try:
        tokens = Tokens.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{path} is damaged: {error}") from error
    tokens.no_truncation()
    tokens.no_padding()
    config = _read_json(directory / "tokenizer_config.json")
    special_tokens = _special_tokens(config)
    source = _chat_template(directory, config)
    return HubTokenizer(tokens, special_tokens, ChatTemplate(source, special_tokens) if source else None, path)


def read_eos_token_ids(directory: Path) -> tuple[int, ...]:
    """The model's own end tokens, as ``generate`` of transformers takes them. Blocks."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if value:
            return tuple(value)
    return ()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelLoadError(f"{path} is damaged: expected a JSON object ({error})") from error
    return parsed


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; each is a text, or a mapping with ``content``."""
    found: dict[str, str] = {}
    for name, value in config.items():
        text: Any = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """A file of its own wins over the configuration, where it may be one of several."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value: Any = config.get("chat_template")
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in cast("list[dict[str, str]]", value)}
        return named.get("default")
    return value if isinstance(value, str) else None
