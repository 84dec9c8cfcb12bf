"""The command line: ``generate``, ``demo`` and ``doctor``; the extra ``cli`` brings what it needs."""

from __future__ import annotations

__all__ = ()
