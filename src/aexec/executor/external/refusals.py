"""Settings that mean nothing where a launcher has started the processes."""

from __future__ import annotations

import dataclasses
from typing import Any

from aexec.config import ExecutorConfig
from aexec.config.executor import DEFAULT_ARENA_BYTES
from aexec.errors import ConfigError

__all__ = ("refuse_foreign_settings",)

_ENVIRONMENT = "the launcher says what this process has"  # G39: it is this process's own, as it is
_REMEDIES = {
    "env": "set it in os.environ before anything reads it, or for the launcher",
    "env_allow": _ENVIRONMENT,
    "env_extra": _ENVIRONMENT,
    "env_deny": _ENVIRONMENT,
    "env_precedence": _ENVIRONMENT,
    "start_method": "the launcher has started the processes",
    "preload": "import it in the script",
    "worker_output": "the launcher says where output goes",
    "spin": "no process waits for messages of another one's executor here",
    "arena_bytes": f"send less at once where the {DEFAULT_ARENA_BYTES / 2**30:g} GiB that there is does not do",
}


def refuse_foreign_settings(config: ExecutorConfig) -> None:
    """Refuse what only a backend that makes its processes can serve.

    Raises:
        ConfigError: Names the setting and the remedy.
    """
    defaults = {each.name: _default(each) for each in dataclasses.fields(config)}
    for name, remedy in _REMEDIES.items():
        value = getattr(config, name)
        if value != defaults[name]:
            raise ConfigError(
                f"ExecutorConfig.{name} is {value!r}, and with backend 'external_launcher' each worker is in a process "
                f"that the launcher has started: leave it out; {remedy}"
            )
    if config.on_failure != "fail":
        raise ConfigError(
            f"ExecutorConfig.on_failure is {config.on_failure!r}, and backend 'external_launcher' makes no processes "
            'that it could make again: leave it at "fail", and let the launcher restart the ranks '
            "(torchrun --max-restarts 3)"
        )


def _default(of: dataclasses.Field[Any]) -> Any:
    return of.default if of.default_factory is dataclasses.MISSING else of.default_factory()
