"""Random numbers that are a function of their place: (seed, position, index) and nothing else.

No generator is advanced and none is kept, so a token's noise is the same in any batch,
after a preemption, after a restart, and on every rank and device. It is made on the CPU
from integers: every platform draws the same bits, and only the last digit of a logarithm
may differ between them.

Source: the mixing function is David Stafford's "Mix13", and row ``i`` of a key is the i-th
output of SplitMix64 started at that key (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ("exponentials", "mix64", "mix64_array")

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix64(value: int) -> int:
    """A bijection of 64-bit integers that spreads each bit over all; negative values wrap."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def mix64_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """:func:`mix64` of each element, in a new array."""
    mixed = values ^ (values >> np.uint64(30))
    mixed *= np.uint64(_FIRST)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(_SECOND)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def exponentials(seeds: Sequence[int], positions: Sequence[int], count: int) -> NDArray[np.float32]:
    """Independent draws of mean one, a row for each (seed, position).

    Args:
        seeds: Any integers of 64 bits, signed or not.
        positions: Index of the token that the row is for.
        count: Draws in a row; a longer row begins with the shorter one.

    Returns:
        float32 ``[len(seeds), count]``, all above zero.
    """
    keys = np.array(
        [mix64(mix64(seed) + position * _GOLDEN) for seed, position in zip(seeds, positions, strict=True)],
        dtype=np.uint64,
    )
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    bits = mix64_array(keys[:, None] + steps[None, :]) >> np.uint64(11)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1), ends left out
    return (-np.log(uniform)).astype(np.float32)
