"""Sets of values and of operations as bit masks, and what sets of values weigh.

Enters: numbers of values or operations (see `Indexed`). Leaves: masks, in which bit n stands for
number n.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator


def mask(bits: Iterable[int]) -> int:
    """The set of these numbers."""
    return union(1 << bit for bit in bits)


def union(masks: Iterable[int]) -> int:
    """What any of the sets has."""
    result = 0
    for one in masks:
        result |= one
    return result


def bits(mask: int) -> Iterator[int]:
    """The numbers in the set, ascending."""
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1


class ValueSets:
    """Bytes of sets of values.

    Args:
        nbytes: per value.
    """

    def __init__(self, nbytes: list[int]) -> None:
        """No set is known yet but the empty one."""
        self._sizes = nbytes
        self._known: dict[int, int] = {0: 0}

    def nbytes(self, values: int) -> int:
        """Bytes of all values of the set together."""
        known = self._known.get(values)
        if known is None:
            lowest = values & -values
            known = self.nbytes(values ^ lowest) + self._sizes[lowest.bit_length() - 1]
            self._known[values] = known
        return known

    def least_sets(self, values: int, nbytes: int) -> Iterator[int]:
        """Sets of values that have the bytes together and would not without any one of them."""
        if nbytes <= 0:
            yield 0
            return
        sizes = self._sizes
        members = sorted((v for v in bits(values) if sizes[v]), key=lambda v: (-sizes[v], v))
        left_after = list(itertools.accumulate((sizes[v] for v in members[::-1]), initial=0))[::-1]
        # Largest first: the set is least if the last one taken, its smallest, is needed.
        stack = [(0, 0, 0)]
        while stack:
            place, chosen, have = stack.pop()
            if have + left_after[place] < nbytes:
                continue
            v = members[place]
            if have + sizes[v] >= nbytes:
                yield chosen | 1 << v
            else:
                stack.append((place + 1, chosen | 1 << v, have + sizes[v]))
            stack.append((place + 1, chosen, have))
