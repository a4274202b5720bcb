"""What is held beside one graph of a step, since the graphs are nested.

Enters: the order of the runs, and what each graph keeps. Leaves: a `Beside`. A later run happens
between the forward and the backward of an earlier one:

    forward 0, forward 1, forward 2, backward 2, backward 1, backward 0

While it lasts, the earlier ones hold what crosses from their forward to their backward; and while
the backward of an earlier one lasts, the gradients are there that the later ones have returned.

In a region of `torch.utils.checkpoint` that is not reentrant, runs drop what crosses. As its last
run's backward begins, all of the region runs again: from then on the earlier ones hold it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from autoremat.memory.spread import Traffic
from autoremat.problem.lower import Lowered


@dataclass(frozen=True)
class Beside:
    """What a step holds beside one of its graphs.

    Attributes:
        held_nbytes: while it runs: what crosses the forwards and backwards of earlier runs.
        gradients_nbytes: in its backward, more: gradients that later runs have returned, and what
            earlier ones of its region have made again.
        passing_nbytes: in its forward, more: what the run before it has returned and nobody holds
            any more as a backward begins.
    """

    held_nbytes: int = 0
    gradients_nbytes: int = 0
    passing_nbytes: int = 0

    @property
    def first_nbytes(self) -> int:
        """In its forward, all of it."""
        return self.held_nbytes + self.passing_nbytes

    @property
    def most_nbytes(self) -> int:
        """In its backward, all of it."""
        return self.held_nbytes + self.gradients_nbytes

    @property
    def stated(self) -> Beside:
        """What a graph's problem says of it: what passes is no part of that."""
        return replace(self, passing_nbytes=0)

    @property
    def throughout(self) -> Beside:
        """As if what passes stayed."""
        left_nbytes = max(0, self.gradients_nbytes - self.passing_nbytes)
        return Beside(self.first_nbytes, left_nbytes)


class Returned(NamedTuple):
    """What is there from the backward of a run on.

    Attributes:
        nbytes: gradients of parameters that it returns; of those that later runs read as well
            there were some already.
        adding_nbytes: by how much adding such up, one after the other, is above the peak before.
        left_nbytes: what it had returned in its forward and somebody holds until the step's end,
            and parameters that stay gathered.
        reduced_nbytes: what its gradients are reduced from, or others after it are.
    """

    nbytes: int
    adding_nbytes: int = 0
    left_nbytes: int = 0
    reduced_nbytes: int = 0


class Region(NamedTuple):
    """Of a checkpoint, that a run is in, and what becomes of its results.

    Attributes:
        number: of it; 0 if the run is in none.
        is_gone: whether nobody held any more what the run had returned, as a backward began, but
            for what its own backward needs; known of runs in none as well.
        state_nbytes: what the checkpoint keeps for itself, if the run is its first.
        traffic: what processes that share the model move for it, where it is known of this run.
    """

    number: int = 0
    is_gone: bool = False
    state_nbytes: int = 0
    traffic: Traffic | None = None


NOWHERE = Region()


class Crossing(NamedTuple):
    """What lives between the forward and the backward of a plan.

    Attributes:
        nbytes: of all of it, what it has returned included.
        passed_nbytes: of that, what it has returned and its backward does not need.
    """

    nbytes: int
    passed_nbytes: int = 0


NOTHING, ALONE = Crossing(0), Traffic()


class Kept(NamedTuple):
    """What a run keeps for its backward.

    Attributes:
        saved_nbytes: from its forward on.
        state_nbytes: more, from before its forward on: what the checkpoint keeps for itself.
        passing_nbytes: more, until the next run has gone forward.
        again_nbytes: more, once its region runs again.
        region: number of the region; 0 if in none.
        gathered_nbytes: more, from its forward on: parameters that stay gathered.
        forward_nbytes: more while it goes forward itself than while other runs of its graph do;
            less than 0 if it is less.
        backward_nbytes: the same while it goes backward.
    """

    saved_nbytes: int
    state_nbytes: int = 0
    passing_nbytes: int = 0
    again_nbytes: int = 0
    region: int = 0
    gathered_nbytes: int = 0
    forward_nbytes: int = 0
    backward_nbytes: int = 0

    @classmethod
    def of(
        cls,
        region: Region,
        crossing: Crossing = NOTHING,
        outputs_nbytes: int = 0,
        traffic: Traffic = ALONE,
    ) -> Kept:
        """By a run of a graph.

        Args:
            region: that it is in.
            crossing: what it hands to its backward.
            outputs_nbytes: what it returns of that.
            traffic: that is counted for its graph.
        """
        own = region.traffic or traffic
        backward_nbytes = own.window_nbytes - traffic.window_nbytes
        forward_nbytes = backward_nbytes + own.forward_nbytes - traffic.forward_nbytes
        moved = (own.run_nbytes, forward_nbytes, backward_nbytes)
        if not region.number:
            passing_nbytes = crossing.passed_nbytes if region.is_gone else 0
            return cls(crossing.nbytes - passing_nbytes, 0, passing_nbytes, 0, 0, *moved)
        passing_nbytes = outputs_nbytes if region.is_gone else 0
        return cls(
            outputs_nbytes - passing_nbytes,
            region.state_nbytes,
            passing_nbytes,
            crossing.nbytes,
            region.number,
            *moved,
        )

    @property
    def waiting_nbytes(self) -> int:
        """What is there until its backward, or its region's rerun."""
        return self.known_nbytes + self.gathered_nbytes

    @property
    def known_nbytes(self) -> int:
        """The same without what a look finds gathered: `Around.eager_nbytes` has that."""
        return self.saved_nbytes + self.state_nbytes


def beside_each(
    kept: Iterable[Kept],
    gradients: Sequence[Returned],
    existing_nbytes: int = 0,
) -> Iterator[tuple[int, int]]:
    """What is held beside each run: in its first forward, and in its backward.

    Args:
        kept: by run, what it keeps for its backward.
        gradients: by run, what its backward returns.
        existing_nbytes: gradients that exist before the step, to which these are added.
    """
    later_nbytes = sum(gradient.nbytes for gradient in gradients)
    left_nbytes = sum(gradient.left_nbytes for gradient in gradients)
    held_nbytes = passing_nbytes = again_nbytes = region = 0
    reduced = [*accumulate((g.reduced_nbytes for g in reversed(gradients)), max, initial=0)]
    for run, gradient, moved_nbytes in zip(kept, gradients, reduced[-2::-1], strict=True):
        later_nbytes -= gradient.nbytes
        left_nbytes -= gradient.left_nbytes
        if run.region != region:
            region, again_nbytes = run.region, 0
        returned_nbytes = max(0, later_nbytes + gradient.adding_nbytes - existing_nbytes)
        most_nbytes = held_nbytes + again_nbytes + left_nbytes + returned_nbytes + moved_nbytes
        first_nbytes = held_nbytes + run.state_nbytes + passing_nbytes
        yield first_nbytes + run.forward_nbytes, most_nbytes + run.backward_nbytes
        held_nbytes += run.waiting_nbytes
        passing_nbytes = run.passing_nbytes
        again_nbytes += run.again_nbytes


def highest(found: Iterable[tuple[int, int]]) -> Beside:
    """What is held beside a graph, in those of its runs that find the most."""
    first_nbytes, most_nbytes = map(max, zip(*found, strict=True))
    held_nbytes = min(first_nbytes, most_nbytes)
    return Beside(held_nbytes, most_nbytes - held_nbytes, first_nbytes - held_nbytes)


@dataclass(frozen=True)
class Around:
    """What a step holds beside what is known of its planned graphs, as steps so far have shown.

    Attributes:
        held_nbytes: while the graphs run: other models, and what code in eager mode has saved.
        returned_nbytes: more, in their backward: gradients that the plans do not count.
        eager_nbytes: while code in eager mode goes backward, beside what is resident and what the
            graphs have left alive.
        passing_nbytes: more, in forwards of graphs: what is gone as a backward begins.
    """

    held_nbytes: int = 0
    returned_nbytes: int = 0
    eager_nbytes: int = 0
    passing_nbytes: int = 0

    @property
    def first_nbytes(self) -> int:
        """While forwards of graphs run, all of it."""
        return self.held_nbytes + self.passing_nbytes

    @property
    def room_nbytes(self) -> int:
        """What eager code takes beyond what is held while the graphs run."""
        return max(0, self.eager_nbytes - self.held_nbytes)

    def is_beyond(self, known: Around) -> bool:
        """Whether it is more than is known, of any kind."""
        pairs = zip(astuple(self), astuple(known), strict=True)
        return any(nbytes > known_nbytes for nbytes, known_nbytes in pairs)

    def beside(self, found: Beside) -> Beside:
        """What is held beside one graph, this included."""
        return Beside(
            found.held_nbytes + self.held_nbytes,
            found.gradients_nbytes + self.returned_nbytes,
            found.passing_nbytes + self.passing_nbytes,
        )


def placed(lowered: Lowered, found: Beside, room_nbytes: int = 0) -> Lowered:
    """The graph's problem, so much being held beside it, but for what passes."""
    shell = replace(
        lowered.shell,
        resident_nbytes=lowered.shell.resident_nbytes + found.held_nbytes,
        later_gradients_nbytes=found.gradients_nbytes,
        room_nbytes=room_nbytes,
    )
    return replace(lowered, shell=shell)
