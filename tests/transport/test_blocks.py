from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from aexec.transport.blocks import PAGE, Blocks


class BlocksMachine(RuleBasedStateMachine):
    """Takes and gives in any order."""

    @initialize()
    def begin(self) -> None:
        self.blocks = Blocks()
        self.taken = []

    @rule(pages=st.integers(1, 64))
    def add(self, pages):
        self.blocks.add(pages * PAGE)

    @rule(size=st.integers(0, 40 * PAGE))
    def take(self, size):
        block = self.blocks.take(size)
        if block is not None:
            assert block.size >= size
            assert block.offset % PAGE == block.size % PAGE == 0
            self.taken.append(block)

    @rule(data=st.data())
    def give(self, data):
        if self.taken:
            self.blocks.give(self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1))))

    @rule()
    def drop_idle(self):
        for segment in self.blocks.idle():
            assert all(block.segment != segment for block in self.taken)
            self.blocks.drop(segment)

    @invariant()
    def blocks_lie_in_segments_and_apart(self):
        for segment, size in self.blocks.segments.items():
            edge = 0
            for block in sorted(block for block in self.taken if block.segment == segment):
                assert block.offset >= edge
                edge = block.offset + block.size
            assert edge <= size

    @invariant()
    def the_books_agree(self):
        assert self.blocks.used == sum(block.size for block in self.taken)
        if not self.taken:
            assert self.blocks.idle() == list(self.blocks.segments), "what is idle is in one piece"


TestBlocks = BlocksMachine.TestCase


def test_what_was_freed_last_is_given_out_first():
    """Its pages are warm."""
    blocks = Blocks()
    blocks.add(64 * PAGE)
    first, second, third = (blocks.take(4 * PAGE) for _ in range(3))
    blocks.give(third)
    blocks.give(first)
    assert blocks.take(2 * PAGE).offset == first.offset
    assert second.offset == 4 * PAGE


def test_numbers_of_segments_are_not_used_again():
    """A reader that still knows an old segment cannot take a new one for it."""
    blocks = Blocks()
    first = blocks.add(PAGE)
    blocks.drop(first)
    assert blocks.add(PAGE) != first
    assert repr(blocks) == f"<Blocks: 0 of {PAGE} bytes used, 1 free extents>"
