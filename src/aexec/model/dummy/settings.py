"""What the dummy model can be told, and how a model name tells it.

``dummy`` is the default; ``dummy:vocab_size=64,forward_seconds=0.01`` sets fields of
:class:`DummySettings` by name, so that a command line, a configuration and a worker in
another process can all ask for the same one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from aexec.errors import ConfigError

__all__ = ("DUMMY_EOS_TOKEN_ID", "DummySettings", "is_dummy")

DUMMY_EOS_TOKEN_ID = 256


def is_dummy(model: str) -> bool:
    """True for ``dummy`` and for ``dummy:name=value,...``."""
    return model.partition(":")[0] == "dummy"


@dataclass(frozen=True, slots=True, kw_only=True)
class DummySettings:
    """Settings of the dummy model.

    Attributes:
        seed: Another seed is another model.
        vocab_size: Token ids are below it. Ids 32 to 126 are the printable ASCII
            characters, and those that lie in the vocabulary are what it says.
        max_model_len: Tokens of prompt and output together; ``ModelConfig.max_model_len`` wins.
        eos_token_id: What it says at its end; any id when it never ends by itself.
        eos_probability: Chance at each token that it ends, in [0, 1].
        forward_seconds: How long a forward pass blocks, over all pipeline stages together.
        poison_token_id: A request whose prompt holds it fails alone, as with NaN logits; -1: none.
        crash_token_id: A prompt that holds it makes the forward pass raise; -1: none.
    """

    seed: int = 0
    vocab_size: int = 512
    max_model_len: int = 2048
    eos_token_id: int = DUMMY_EOS_TOKEN_ID
    eos_probability: float = 0.0
    forward_seconds: float = 0.0
    poison_token_id: int = -1
    crash_token_id: int = -1

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        self._require("vocab_size", "at least 2", holds=self.vocab_size >= 2)
        self._require("max_model_len", "at least 2", holds=self.max_model_len >= 2)
        self._require("eos_probability", "a probability from 0 to 1", holds=0.0 <= self.eos_probability <= 1.0)
        self._require("forward_seconds", "seconds from 0 to an hour", holds=0.0 <= self.forward_seconds < 3600.0)
        reachable = self.eos_probability == 0.0 or 0 <= self.eos_token_id < self.vocab_size
        expected = f"an id below vocab_size, {self.vocab_size}, as eos_probability is set"
        self._require("eos_token_id", expected, holds=reachable)

    @classmethod
    def parse(cls, model: str) -> DummySettings:
        """Settings from a model name.

        Raises:
            ConfigError: The name is not the dummy's, or a setting is unknown or out of range.
        """
        if not is_dummy(model):
            raise ConfigError(f'the model is {model!r}: expected "dummy" or "dummy:name=value,..."')
        pairs = [pair for pair in model.partition(":")[2].split(",") if pair]
        values: dict[str, Any] = dict(_parse_pair(pair) for pair in pairs)
        return cls(**values)

    def __str__(self) -> str:
        """The name that :meth:`parse` reads."""
        values = (f"{each.name}={getattr(self, each.name)}" for each in dataclasses.fields(self))
        return f"dummy:{','.join(values)}"

    def _require(self, name: str, expected: str, *, holds: bool) -> None:
        if not holds:
            raise ConfigError(f"the dummy's {name} is {getattr(self, name)!r}: expected {expected}")


def _parse_pair(pair: str) -> tuple[str, int | float]:
    name, _, text = pair.partition("=")
    kinds = {each.name: float if each.type == "float" else int for each in dataclasses.fields(DummySettings)}
    if name not in kinds:
        raise ConfigError(f"the dummy has no setting {name!r}; it has {', '.join(kinds)}")
    try:
        return name, kinds[name](text)
    except ValueError:
        raise ConfigError(f"the dummy's {name} is {text!r}: expected {kinds[name].__name__}") from None
