"""The engine: schedules requests, runs the step loop, hands out tokens.

``AsyncLLM`` and ``LLM`` of this room know no executor and no model of their own; what
users import from ``aexec`` is put together in ``aexec.assemble``. What ``llm.events()`` tells
is imported from here.
"""

from __future__ import annotations

from aexec.engine.events import EngineDown, EngineEvent, EngineFailed, EngineRecovered, RequestCondemned

__all__ = ("EngineDown", "EngineEvent", "EngineFailed", "EngineRecovered", "RequestCondemned")
