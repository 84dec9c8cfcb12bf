"""Chat templates: from a conversation to a prompt.

A template is a Jinja program that comes with the model, so it runs in a sandbox. What it
may use (``raise_exception``, ``strftime_now``, ``tojson``, ``break``) is a convention of
Hugging Face's, kept here.

Source: transformers 5.24, ``utils/chat_template_utils.py``, ``_compile_jinja_template``.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

from aexec.errors import InvalidRequest, MissingExtra

__all__ = ("ChatTemplate", "check_messages")


class ChatTemplate:
    """One model's template.

    Args:
        source: The Jinja program.
        special_tokens: Texts that it may use by name, as ``bos_token``.

    Raises:
        MissingExtra: Jinja is not installed.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise MissingExtra("a chat template", "models", "jinja2") from None
        environment: Any = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        tools = {"raise_exception": _refuse, "strftime_now": _strftime_now}
        self._template = environment.from_string(source, globals=tools)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The prompt, up to where the assistant answers.

        Raises:
            InvalidRequest: The template does not take these messages.
        """
        from jinja2 import TemplateError

        check_messages(messages)
        try:
            said = [dict(message) for message in messages]
            prompt: str = self._template.render(messages=said, add_generation_prompt=True, **self._special_tokens)
        except TemplateError as error:
            raise InvalidRequest(f"the model's chat template does not take these messages: {error}") from error
        return prompt


def check_messages(messages: Any) -> None:
    """Refuse what is not a conversation, a sequence of mappings with ``role`` and ``content``.

    Raises:
        InvalidRequest: There is no message, or one lacks its role or its content.
    """
    if isinstance(messages, str | Mapping) or not messages:
        raise InvalidRequest(
            f'messages is {messages!r}: expected a list such as [{{"role": "user", "content": "Hello"}}]'
        )
    for place, message in enumerate(messages):
        if not (isinstance(message, Mapping) and {"role", "content"} <= {*cast("Mapping[object, object]", message)}):
            raise InvalidRequest(
                f'messages[{place}] is {message!r}: expected {{"role": "system" | "user" | "assistant", "content": ...}}'
            )


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return dt.datetime.now().astimezone().strftime(pattern)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
