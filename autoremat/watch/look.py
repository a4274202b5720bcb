"""What a look into a situation shows: what a step will reach, and what is beside its graphs.

Enters: the graphs of a backward with what the step's own account has beside each, what eager code
around them is foreseen to make, and all that is live. Leaves: a `Look`. Guarantees: nothing is
measured or held here; `Audit` says when to look.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from autoremat.memory.spread import Spread, Traffic
from autoremat.planning.nesting import Beside
from autoremat.planning.part import Part
from autoremat.planning.ran import Ran
from autoremat.watch.eager_backward import Foreseen
from autoremat.watch.open_run import SCALARS_NBYTES, Run

EAGER_MARGIN = 1.1  # of what eager code is foreseen to make, for what of it cannot be seen


class Look(NamedTuple):
    """What a look into a situation has shown.

    Attributes:
        peak_nbytes: the highest number of live bytes that the step will reach from here on.
        beside_nbytes: what is beside the graph, beyond the step's own account.
        eager_nbytes: as of `Around`; 0 where no backward has begun.
        is_told_only: whether no plan learns of it: graphs run at other sizes than were planned, or
            the backward goes through none.
        is_larger: whether a size of such a graph is larger than was planned.
        situation: what tells it from others.
        is_partial: whether more is there than can be told yet, as checkpoints will make it again.
        is_apart: whether it is a backward of code in eager mode, while no graph waits for its own.
        counted: runs whose results count as held in the step's own account, and bytes of these: if
            they turn out to be gone when a backward begins, so much more was beside it.
    """

    peak_nbytes: int
    beside_nbytes: int
    eager_nbytes: int = 0
    is_told_only: bool = False
    is_larger: bool = False
    situation: Hashable = None
    is_partial: bool = False
    is_apart: bool = False
    counted: tuple[tuple[Ran, int], ...] = ()


def look_at(
    parts: Mapping[Run, tuple[Part, Beside]],
    foreseen: Foreseen,
    base_nbytes: int,
    spread: Spread,
    *,
    keeps_graph: bool,
) -> Look:
    """What a backward will take, and how much of it the account of the step does not have."""
    reached, reduced_nbytes = [], 0
    for run, beside in foreseen.beside_nbytes.items():
        if run in parts:
            traffic = _traffic_of(run, parts[run][0])
            moved_nbytes = _to_gather_nbytes(spread, traffic) + reduced_nbytes
            reached.append((run, *parts[run], beside + moved_nbytes))
            reduced_nbytes = max(reduced_nbytes, traffic.reduced_nbytes)
    counted = max((part.resident_nbytes for part, _ in parts.values()), default=0)
    crossing = sum(run.held_nbytes for run in parts)
    peaks = [
        base_nbytes + beside + (part.kept if keeps_graph else part).own_peaks[1]
        for _, part, _, beside in reached
    ]
    # At the sizes that are planned for, eager code takes as much more as they are larger.
    grown = max((part.shrunk for part, _ in parts.values()), default=1.0) - 1
    more = _more_nbytes(reached, base_nbytes, 1 + grown, keeps_graph=keeps_graph)
    made_nbytes = foreseen.eager_peak_nbytes - foreseen.first_nbytes - foreseen.remade_nbytes
    margin_nbytes = int((EAGER_MARGIN - 1) * max(0, made_nbytes))
    eager_nbytes = base_nbytes + foreseen.eager_peak_nbytes + margin_nbytes
    eager_nbytes += max(0, spread.traffic.window_nbytes - passing_nbytes(spread))
    # What the last run was gathered into is there until all of the forward is over.
    flight_nbytes = _traffic_of(*reached[0][:2]).forward_nbytes if reached else 0
    if flight_nbytes:
        eager_nbytes = max(eager_nbytes, base_nbytes + foreseen.behind_nbytes + flight_nbytes)
    beside_nbytes = max(more, default=0)
    grown_nbytes = int(grown * max(0, foreseen.eager_peak_nbytes + margin_nbytes - crossing))
    return Look(
        max([eager_nbytes, *peaks]),
        beside_nbytes,
        eager_nbytes + grown_nbytes - counted - crossing,
        not reached or any(part.is_resized for part, _ in parts.values()),
        not reached or any(part.is_larger for part, _ in parts.values()),
    )


def _more_nbytes(
    reached: Sequence[tuple[Run, Part, Beside, int]],
    base_nbytes: int,
    shrunk: float,
    *,
    keeps_graph: bool,
) -> Iterator[int]:
    """By run, what its backward takes beyond the account, where sizes are the largest.

    Args:
        reached: in the order of the backward, with what the account has beside each, and what is.
        base_nbytes: what is live whatever runs.
        shrunk: as of `Part`, the most of the graphs that wait.
        keeps_graph: whether what was saved stays afterwards.
    """
    # Plans for parts of the ranges are accounted for at the largest sizes of these.
    corner = max((part.corner for _, part, *_ in reached), default=1.0)
    returned_nbytes = 0
    for number, (run, part, found, beside) in enumerate(reached):
        own_nbytes = (part.kept if keeps_graph else part).own_peaks[1]
        counted_nbytes = _as_counted(run, part).peak_in_backward(found) - part.resident_nbytes
        # Each graph that waits keeps so much more at the largest sizes as its own are smaller.
        waiting = [(other.held_nbytes, its.kept_growth) for other, its, *_ in reached[number + 1 :]]
        rest_nbytes = beside - sum(nbytes for nbytes, _ in waiting)
        # Gradients of parameters do not grow, nor does a loss, or what is there whatever runs.
        same_nbytes = min(returned_nbytes, found.gradients_nbytes, rest_nbytes)
        if rest_nbytes - same_nbytes <= SCALARS_NBYTES:
            same_nbytes = rest_nbytes
        growing_nbytes = shrunk * (rest_nbytes - same_nbytes)
        growing_nbytes += sum(nbytes * growth for nbytes, growth in waiting)
        grown_nbytes = same_nbytes + int(growing_nbytes / corner)
        beyond_nbytes = own_nbytes + grown_nbytes - counted_nbytes
        beyond_nbytes = int(corner * beyond_nbytes) if beyond_nbytes > 0 else beyond_nbytes
        yield base_nbytes - part.resident_nbytes + beyond_nbytes
        returned_nbytes += part.figures.gradients_nbytes


def _as_counted(run: Run, part: Part) -> Part:
    """The graph of a run as the step's account has it: for the backward that takes the most."""
    return part.kept if run.ran is not None and run.ran.is_kept else part


def _traffic_of(run: Run, part: Part) -> Traffic:
    """What processes that share the model move for a run."""
    known = None if run.ran is None else run.ran.region.traffic
    return known or part.resident.traffic


def _to_gather_nbytes(spread: Spread, traffic: Traffic) -> int:
    """What processes that share the model will gather while a run goes backward, beyond now."""
    return max(0, traffic.window_nbytes - traffic.run_nbytes - passing_nbytes(spread))


def passing_nbytes(spread: Spread) -> int:
    """What is gathered or communicated now, but for what runs of graphs keep."""
    return max(0, spread.now_nbytes - spread.kept_nbytes)
