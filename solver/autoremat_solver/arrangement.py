"""A schedule taken apart: an order of first runs, and reruns right before the runs that need them.

Enters: a schedule of operation numbers. Leaves: an `Arrangement`, and its `Layout`: which
instance of a value lives from which step to which. `rearrange` searches over arrangements;
nothing here decides anything. `simulate` stays the definition of live bytes: a layout's are
equal to it (tested), and kept because a search asks for them ten thousand times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from autoremat_solver.indexed import Indexed
from autoremat_solver.problem import Phase

Reruns = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class Arrangement:
    """A schedule.

    Attributes:
        order: operations in the order of the runs that are no reruns.
        reruns: by operation of `order`, the operations to run again right before it, in an order
            in which each finds its inputs.
    """

    order: tuple[int, ...]
    reruns: Reruns

    def without(self, dropped: set[tuple[int, int]]) -> Arrangement:
        """This arrangement without some reruns, given as (operation, before)."""
        left = {
            before: tuple(op for op in ops if (op, before) not in dropped)
            for before, ops in self.reruns.items()
        }
        return Arrangement(self.order, {before: ops for before, ops in left.items() if ops})

    def all_reruns(self) -> list[tuple[int, int]]:
        """Every rerun as (operation, before)."""
        return [(op, before) for before, ops in self.reruns.items() for op in ops]


class Rules:
    """Which operations may run again where, and what a problem without phases leaves free.

    Attributes:
        indexed: the step.
        may_reorder: whether first runs may change places: only in a graph without phases.
    """

    def __init__(self, indexed: Indexed) -> None:
        """Read the rules off the problem."""
        self.indexed = indexed
        self.may_reorder = Phase.ANY in indexed.phase
        self._first_backward = indexed.backward_ops[0] if indexed.backward_ops else None

    def take_apart(self, steps: list[int]) -> Arrangement:
        """The arrangement of a schedule whose reruns stand right before what they are for."""
        backward = self.indexed.is_backward
        begun, order, reruns, pending = False, [], {}, []
        seen: set[int] = set()
        for op in steps:
            if op in seen or (begun and not backward[op]):
                pending.append(op)
                continue
            begun = begun or backward[op]
            seen.add(op)
            order.append(op)
            if pending:
                reruns[op] = tuple(dict.fromkeys(pending))
                pending = []
        order += [op for op in dict.fromkeys(pending) if op not in seen]
        return Arrangement(tuple(order), reruns)

    def earliest_places(self, order: tuple[int, ...]) -> list[int]:
        """Per operation, the first place of `order` before which it may run again."""
        never = len(order) + 1
        if self._first_backward is None and not self.may_reorder:
            return [never] * len(self.indexed.phase)
        places = {op: place for place, op in enumerate(order)}
        backward = places[self._first_backward] if self._first_backward is not None else -1
        return [
            1 + max(places.get(op, backward), backward) if may else never
            for op, may in enumerate(self.indexed.rerunnable)
        ]


class Layout:
    """The steps of an arrangement, and every instance of a value.

    Attributes:
        arrangement: what is laid out.
        steps: operations, reruns included.
        places: per step, the place in the order that it belongs to.
        value, born, reads: per instance, its value, the step that makes it, the steps that read it.
        instances: per value, its instances in the order of their making.
        live_nbytes: per step.
    """

    def __init__(self, indexed: Indexed, arrangement: Arrangement) -> None:
        """Lay out; linear in the reads. KeyError if a read finds no instance."""
        self.arrangement = arrangement
        self._indexed = indexed
        self.steps, self.places = _merged(arrangement)
        self.value: list[int] = []
        self.born: list[int] = []
        self.reads: list[list[int]] = []
        self.instances: dict[int, list[int]] = {}
        self._place_instances()
        self.live_nbytes = self._live_nbytes()

    def last(self, instance: int) -> int:
        """The last step that reads an instance; its making if none does."""
        reads = self.reads[instance]
        return reads[-1] if reads else self.born[instance]

    def before(self, value: int, step: int) -> int | None:
        """The latest instance of a value that is made before a step."""
        known = self.instances.get(value, ())
        place = bisect_left(known, step, key=self.born.__getitem__)
        return known[place - 1] if place else None

    def rerun_steps(self) -> dict[tuple[int, int], int]:
        """Per rerun, as (operation, before), its step."""
        order = self.arrangement.order
        return {
            (op, order[place]): step
            for step, (op, place) in enumerate(zip(self.steps, self.places, strict=True))
            if op != order[place]
        }

    def _place_instances(self) -> None:
        inputs, outputs, pinned = self._indexed.inputs, self._indexed.outputs, self._indexed.pinned
        current: dict[int, list[int]] = {}
        for step, op in enumerate(self.steps):
            for v in inputs[op]:
                current[v].append(step)
            for v in outputs[op]:
                reads: list[int] = []
                if not (pinned[v] and v in current):
                    current[v] = reads
                    self.instances.setdefault(v, []).append(len(self.value))
                self.value.append(v)
                self.born.append(step)
                self.reads.append(reads)

    def _live_nbytes(self) -> list[int]:
        indexed, end = self._indexed, len(self.steps)
        change = [0] * (end + 1)
        for v, known in self.instances.items():
            if indexed.pinned[v]:
                change[self.born[known[0]]] += indexed.nbytes[v]
        for instance, v in enumerate(self.value):
            nbytes = indexed.nbytes[v]
            if indexed.pinned[v]:
                if self.instances[v][0] == instance:
                    continue
                change[self.born[instance]] += nbytes
                change[self.born[instance] + 1] -= nbytes
                continue
            change[self.born[instance]] += nbytes
            change[self.last(instance) + 1] -= nbytes
        live = accumulate(change[:-1], initial=indexed.problem.resident_nbytes)
        next(live)
        workspace = indexed.workspace_nbytes
        return [n + workspace[op] for n, op in zip(live, self.steps, strict=True)]


def _merged(arrangement: Arrangement) -> tuple[list[int], list[int]]:
    steps: list[int] = []
    places: list[int] = []
    for place, op in enumerate(arrangement.order):
        again = arrangement.reruns.get(op)
        if again:
            steps.extend(again)
            places.extend([place] * len(again))
        steps.append(op)
        places.append(place)
    return steps, places
