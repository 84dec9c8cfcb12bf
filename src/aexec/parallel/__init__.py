"""Ranks, and how they share a model."""

from __future__ import annotations

from aexec.parallel.layout import Coordinates as Coordinates
from aexec.parallel.layout import Place as Place
from aexec.parallel.layout import RankLayout as RankLayout
from aexec.parallel.layout import coordinates as coordinates

__all__ = ("Coordinates", "Place", "RankLayout", "coordinates")
