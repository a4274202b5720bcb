"""Which situations of a step are looked into: each a few times, and ever more rarely.

Enters: situations as they come, each with the sizes that it comes at. Leaves: whether a look is
due. Guarantees: of `n` steps that are alike, about the logarithm of `n` are looked into.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Hashable

from autoremat import _torch

LOOKS = 2  # within a backward
PARTIAL_LOOKS = 8  # in a row, where a forward was not noted, or a checkpoint did not run yet

Sizes = tuple[int, ...]


class Situations:
    """Those of one session's steps."""

    def __init__(self) -> None:
        """None has come."""
        self._seen: defaultdict[Hashable, Counter[Sizes]] = defaultdict(Counter)
        self._partial = Counter[Hashable]()  # looks that could not see all, since one that could

    def forget(self) -> None:
        """All of them are new."""
        self._seen.clear()
        self._partial.clear()

    def is_known(self, situation: Hashable, sizes: Sizes = ()) -> bool:
        """Whether a situation needs no look now, at these sizes or larger ones.

        Its first two occurrences do: the first may come before lazy state exists. So do the 4th,
        the 8th, and so on: what a step's own code holds may come after some of its batches. Within
        a backward, which reruns its checkpoints one by one, no more do.
        """
        seen = self._seen[situation]  # hashed once: it is as long as runs are open
        key = _known_sizes(seen, sizes)
        before = seen[key]
        seen[key] = before + 1
        return before >= LOOKS if _torch.is_in_backward() else before & (before + 1) != 0

    def is_again(self, situation: Hashable, sizes: Sizes, *, is_partial: bool) -> bool:
        """Whether the next occurrence needs a look as well, since this one could not see all."""
        if not is_partial:
            self._partial.pop(situation, None)
        is_again = is_partial and self._partial[situation] < PARTIAL_LOOKS
        if is_again:
            self._partial[situation] += 1
            seen = self._seen[situation]
            seen[_known_sizes(seen, sizes)] -= 1
        return is_again


def about(size: int, per_octave: int) -> int:
    """A number that changes so often until a size has doubled, and stays meanwhile."""
    return math.ceil(per_octave * math.log2(1 + size))


def _known_sizes(seen: Counter[Sizes], sizes: Sizes) -> Sizes:
    """As large or larger ones that a situation has come at; these, if there are none."""
    if sizes in seen:  # mostly; no larger ones came before, or it would not be there
        return sizes
    known = (other for other in seen if all(map(operator.le, sizes, other)))
    return next(known, sizes)
