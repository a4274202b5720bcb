"""What is held beside one graph of a step, since the graphs are nested.

Enters: the order of the runs, and what each graph keeps. Leaves: a `Beside`. A later run happens
between the forward and the backward of an earlier one:

    forward 0, forward 1, forward 2, backward 2, backward 1, backward 0

While it lasts, the earlier ones hold what crosses from their forward to their backward; and while
the backward of an earlier one lasts, the gradients are there that the later ones have returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from autoremat.problem.lower import Lowered


@dataclass(frozen=True)
class Beside:
    """What a step holds beside one of its graphs.

    Attributes:
        held_nbytes: while it runs: what crosses the forwards and backwards of earlier runs.
        gradients_nbytes: in its backward, more: gradients that later runs have returned.
    """

    held_nbytes: int = 0
    gradients_nbytes: int = 0

    @property
    def most_nbytes(self) -> int:
        """In its backward, all of it."""
        return self.held_nbytes + self.gradients_nbytes

    def beyond(self, existing_nbytes: int) -> Beside:
        """The same where gradients exist already, to which those of later runs are added."""
        return Beside(self.held_nbytes, max(0, self.gradients_nbytes - existing_nbytes))


class Returned(NamedTuple):
    """Gradients of parameters that the backward of a run returns.

    Attributes:
        nbytes: of those that are there from then on; of parameters that later runs read as well
            there were some already.
        adding_nbytes: by how much adding such up, one after the other, is above the peak before.
    """

    nbytes: int
    adding_nbytes: int = 0


def beside(
    order: Sequence[int],
    number: int,
    crossing: Sequence[int],
    gradients: Sequence[Returned],
    reduced_nbytes: int = 0,
) -> Beside:
    """What is held beside a graph in that of its runs which finds the most.

    Args:
        order: the number of the graph of each run.
        number: the graph.
        crossing: by run, bytes that cross from its forward to its backward.
        gradients: by run, what its backward returns.
        reduced_nbytes: more once any backward has returned some: what they are reduced from.
    """
    held = list(accumulate(crossing, initial=0))
    returned = list(accumulate((gradient.nbytes for gradient in gradients), initial=0))
    moved = [*(reduced_nbytes for _ in order[1:]), 0]  # no backward comes before that of the last
    found = [
        (held[run], returned[-1] - returned[run + 1] + gradients[run].adding_nbytes + moved[run])
        for run, graph in enumerate(order)
        if graph == number
    ]
    most_nbytes, held_nbytes = max(map(sum, found)), max(held for held, _ in found)
    return Beside(held_nbytes, most_nbytes - held_nbytes)


@dataclass(frozen=True)
class Around:
    """What a step holds beside what is known of its planned graphs, as steps so far have shown.

    Attributes:
        held_nbytes: while the graphs run: other models, and what code in eager mode has saved.
        returned_nbytes: more, in their backward: gradients that the plans do not count.
        eager_nbytes: while code in eager mode goes backward, beside what is resident and what the
            graphs have left alive.
    """

    held_nbytes: int = 0
    returned_nbytes: int = 0
    eager_nbytes: int = 0

    @property
    def room_nbytes(self) -> int:
        """What eager code takes beyond what is held while the graphs run."""
        return max(0, self.eager_nbytes - self.held_nbytes)

    def beside(self, found: Beside) -> Beside:
        """What is held beside one graph, this included."""
        return Beside(
            found.held_nbytes + self.held_nbytes, found.gradients_nbytes + self.returned_nbytes
        )


def placed(lowered: Lowered, found: Beside, room_nbytes: int = 0) -> Lowered:
    """The graph's problem, so much being held beside it."""
    shell = replace(
        lowered.shell,
        resident_nbytes=lowered.shell.resident_nbytes + found.held_nbytes,
        later_gradients_nbytes=found.gradients_nbytes,
        room_nbytes=room_nbytes,
    )
    return replace(lowered, shell=shell)
