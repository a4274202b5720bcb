"""The runs of a step, as they happen.

Enters: a plan's name whenever its graph runs, with its arguments. Leaves: `Ran`s in their order,
and what the backward of each returns. Guarantees: holds no tensor.
"""

from __future__ import annotations

import functools
import math
import operator
import weakref
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from autoremat.planning.allotting import Runs, graph_of_plan
from autoremat.planning.nesting import ALONE, NOWHERE, Kept, Region, Returned
from autoremat.planning.part import Part


@dataclass(eq=False)
class Ran:
    """A run of a step.

    Attributes:
        name: of the plan, or of a layer in eager mode.
        region: of which checkpoint it is in.
        held: share of what it had returned that somebody held as its backward began, at most.
        lasting: share of what it had returned that somebody held after its backward.
        is_kept: whether a backward has gone through it that keeps its graph.
        again_nbytes: gradients of parameters of which later runs return some as well.
        adding_nbytes: what autograd takes to add to one of them, as its backward ends.
        is_spare: whether no step has had it: plans leave room for it.
    """

    name: str
    region: Region = NOWHERE
    held: float = 1.0
    lasting: float = 0.0
    is_kept: bool = False
    again_nbytes: int = 0
    adding_nbytes: int = 0
    is_spare: bool = False

    @functools.cached_property
    def graph(self) -> str:
        """Name of the graph, or of the layer."""
        return graph_of_plan(self.name)

    def expect(self, like: Ran | None) -> None:
        """Its results will last as long as those of one in an earlier step."""
        if like is not None:
            known = like.region
            self.region = self.region._replace(is_gone=known.is_gone, traffic=known.traffic)
            self.held, self.lasting = like.held, like.lasting
            self.is_kept = like.is_kept

    def kept(self, part: Part) -> Kept:
        """What it keeps for its backward by a plan."""
        return part.kept_by(self.region, part.figures.crossing)

    def returned(self, part: Part, unreduced_nbytes: int = 0) -> Returned:
        """What is there after its backward by a plan, and such gradients of later runs in it."""
        adding_nbytes = self.adding_nbytes
        if adding_nbytes:  # only what is above the peak before
            adding_nbytes = max(0, part.figures.end_nbytes + adding_nbytes - part.own_peaks[1])
        traffic = self.region.traffic or part.resident.traffic
        gradient_nbytes = int(traffic.gradient_share * part.figures.gradients_nbytes)
        return Returned(
            max(0, gradient_nbytes - self.again_nbytes),
            adding_nbytes + unreduced_nbytes,
            self.left_by(part) + traffic.staying_nbytes,
            traffic.reduced_nbytes,
        )

    def left_by(self, part: Part) -> int:
        """What outlives its backward of what it returned, and of the gradients of that."""
        if not self.lasting:
            return 0
        figures = part.figures
        return math.ceil(self.lasting * figures.outputs_nbytes) + figures.held_tangents_nbytes


_FACTS = operator.attrgetter(*(one.name for one in fields(Ran)))


def facts_of(ran: Ran) -> Hashable:
    """All that is known of a run: runs of which the same is known are alike."""
    return _FACTS(ran)


def as_run(part: Part, runs: Sequence[Ran]) -> Part:
    """A plan as these runs of it are, all taken together, in a backward that keeps nothing."""
    if any(ran.region.number for ran in runs):
        part = part.run_again
    return part.as_held(max((ran.held for ran in runs), default=1.0))


def as_in_step(part: Part, runs: Sequence[Ran]) -> Part:
    """A plan as its runs are, whichever backward goes through them."""
    part = as_run(part, runs)
    return part.kept if any(ran.is_kept for ran in runs) else part


def with_spare(order: Sequence[Ran], spare: Mapping[str, int]) -> list[Ran]:
    """A part of a step with so many runs more of its graphs, each behind the last of its graph.

    What earlier runs return of a parameter that later ones read, these do as well.
    """
    found = list(order)
    for graph, count in spare.items():
        places = [number for number, ran in enumerate(found) if ran.graph == graph]
        if not places:
            continue
        first, last = found[places[0]], found[places[-1]]
        like_first = replace(
            last, again_nbytes=first.again_nbytes, adding_nbytes=first.adding_nbytes
        )
        anywhere = last.region._replace(traffic=None)  # nobody knows which unit it will be in
        more = [replace(like_first, is_spare=True, region=anywhere) for _ in range(count - 1)]
        more.append(replace(last, is_spare=True, region=anywhere))
        found[places[-1] : places[-1] + 1] = [like_first, *more]
    return found


def unreduced_nbytes(order: Sequence[Ran], parts: Mapping[str, Part]) -> list[int]:
    """By run, what is reduced only behind its backward: of gradients of later ones in its unit."""
    found: list[int] = []
    unit, nbytes = -1, 0
    for ran in reversed(order):
        traffic = ran.region.traffic or ALONE
        nbytes = nbytes if traffic.unit == unit else 0
        unit = traffic.unit
        found.append(nbytes)
        if ran.name in parts and unit >= 0:
            left = max(0.0, traffic.gradient_share)
            nbytes += int((1 - left) * parts[ran.name].figures.gradients_nbytes)
    return found[::-1]


def as_runs(
    all_ran: Sequence[Ran],
    plans: Mapping[str, Part],
    eager_gradient_nbytes: Mapping[str, int],
    existing_nbytes: int,
) -> Runs:
    """A step that runs graphs, and layers in eager mode, in this order.

    Args:
        all_ran: the runs.
        plans: of the graphs, by name: all others are layers.
        eager_gradient_nbytes: of such layers, by name.
        existing_nbytes: gradients that exist before it.
    """
    order = [ran.name for ran in all_ran]
    parts = {
        name: as_in_step(plans[name], [ran for ran in all_ran if ran.name == name])
        for name in dict.fromkeys(order)
        if name in plans
    }
    traffic = [part.resident.traffic for part in parts.values()]
    reduced_nbytes = max((each.reduced_nbytes for each in traffic), default=0)
    layers = dict.fromkeys(name for name in order if name not in parts)
    waiting = unreduced_nbytes(all_ran, parts)
    numbers = {name: number for number, name in enumerate([*parts, *layers])}
    return Runs(
        parts,
        [numbers[name] for name in order],
        [
            ran.returned(parts[ran.name], unreduced)
            if ran.name in parts
            else Returned(eager_gradient_nbytes.get(ran.name, 0), reduced_nbytes=reduced_nbytes)
            for ran, unreduced in zip(all_ran, waiting, strict=True)
        ],
        [ran.region for ran in all_ran],
        existing_nbytes,
        [ran.is_spare for ran in all_ran],
    )


class Readers:
    """Which run read a parameter last, of those whose backward returns a gradient of it."""

    def __init__(self) -> None:
        """None yet."""
        self._latest: dict[int, tuple[weakref.ref[torch.Tensor], Ran]] = {}

    def clear(self) -> None:
        """Another step begins."""
        self._latest.clear()

    def note(self, ran: Ran, part: Part, args: Sequence[Any]) -> None:
        """A run of a graph begins, with these arguments.

        Where torch has parted arguments into tensors of its own, nothing is known of them.
        """
        if len(args) != part.figures.arguments:
            return
        for gradient in part.gradients:
            parameter = args[gradient.number]
            found, before = self._latest.get(id(parameter), (None, None))
            if found is not None and before is not None and found() is parameter:
                before.again_nbytes += gradient.nbytes
                if gradient.is_view:  # autograd adds nothing to it where it lies, but makes a sum
                    before.adding_nbytes = max(before.adding_nbytes, gradient.nbytes)
            self._latest[id(parameter)] = (weakref.ref(parameter), ran)


def apart(parts: Sequence[list[Ran]]) -> list[list[Ran]]:
    """The parts of a step, each without those all of whose runs another one has as well.

    The longest first; of equal ones the latest.
    """
    found: list[list[Ran]] = []
    latest_first = list(reversed(parts))
    for part in sorted(latest_first, key=len, reverse=True):
        # Each call of a step asks: most often with what there was before the latest runs.
        is_grown = any(part == other[: len(part)] for other in found)
        if not is_grown and not any(_graphs_of(part) <= _graphs_of(other) for other in found):
            found.append(part)
    return found


def _graphs_of(part: Sequence[Ran]) -> Counter[str]:
    return Counter(ran.graph for ran in part)
