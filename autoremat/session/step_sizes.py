"""Whether all graphs of a step run at the same sizes.

Enters: runs of graphs, with the sizes of their calls. Leaves: whether steps have had several sizes
of one name, as one has that calls a model twice before its backward. Guarantees: once seen, it is
known for ever: plans for parts of the ranges rest on graphs that choose the same part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoremat.planning.part import Part


class StepSizes:
    """Of the steps of one session.

    Attributes:
        are_several: whether any step has had several sizes of one name.
    """

    def __init__(self) -> None:
        """Nothing has run yet."""
        self.are_several = False
        self._now: dict[str, set[int]] = {}  # by name, of the first run of this step that has it

    def begin(self) -> None:
        """Another step begins."""
        self._now.clear()

    def note(self, part: Part, numbers: Mapping[Any, int]) -> bool:
        """A graph is about to run, its symbols standing for these numbers.

        Returns:
            Whether it is the first that makes several sizes of one.
        """
        before = self.are_several
        names = part.covered.names if part.covered is not None else {}
        sizes: dict[str, set[int]] = {}  # two inputs of one run may have several of one name
        for symbol, number in numbers.items():
            if symbol in names:
                sizes.setdefault(names[symbol], set()).add(number)
        for name, found in sizes.items():
            self.are_several |= self._now.setdefault(name, found) != found
        return self.are_several and not before
