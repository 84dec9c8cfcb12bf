"""What backends share whose workers are processes with two lines each, whoever made the processes."""

from __future__ import annotations

from aexec.executor.lines.group import LineGroup as LineGroup
from aexec.executor.lines.launch import launch_of as launch_of
from aexec.executor.lines.launch import spin_of as spin_of
from aexec.executor.lines.rank import RankLines as RankLines

__all__ = ("LineGroup", "RankLines", "launch_of", "spin_of")
