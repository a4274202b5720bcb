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
from functools import cached_property

import numpy as np

from autoremat_solver.model.indexed import Indexed
from autoremat_solver.plans.fast_measure import EXACT_NBYTES, Ints, events_of, live_nbytes, spans
from autoremat_solver.problem import Phase
from autoremat_solver.simulate import measure

Reruns = Mapping[int, tuple[int, ...]]


class Order(tuple[int, ...]):
    """Operations in the order of the runs that are no reruns; arrangements of a search share it."""

    @cached_property
    def place(self) -> dict[int, int]:
        """Per operation, where it is."""
        return {op: place for place, op in enumerate(self)}


@dataclass(frozen=True)
class Arrangement:
    """A schedule.

    Attributes:
        order: of first runs.
        reruns: by operation of `order`, the operations to run again right before it, in an order
            in which each finds its inputs.
    """

    order: Order
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
        self._earliest: tuple[Order, list[int]] | None = None  # of the order asked for last

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
        return Arrangement(Order(order), reruns)

    def earliest_places(self, order: Order) -> list[int]:
        """Per operation, the first place of `order` before which it may run again."""
        if self._earliest is None or self._earliest[0] is not order:
            self._earliest = order, self._earliest_places(order)
        return self._earliest[1]

    def _earliest_places(self, order: Order) -> list[int]:
        never = len(order) + 1
        if self._first_backward is None and not self.may_reorder:
            return [never] * len(self.indexed.phase)
        backward = -1 if self._first_backward is None else order.place[self._first_backward]
        return [
            1 + max(order.place.get(op, backward), backward) if may else never
            for op, may in enumerate(self.indexed.rerunnable)
        ]


class Layout:
    """The steps of an arrangement, and every instance of a value.

    Instances are numbered by value, and then in the order of their making. A search looks at the
    live bytes of most layouts and at nothing else, so the rest is made when it is asked for.

    Attributes:
        arrangement: what is laid out.
        steps: operations, reruns included.
        places: per step, the place in the order that it belongs to.
        live: live bytes per step.
        spans: the instances as arrays.
    """

    def __init__(self, indexed: Indexed, arrangement: Arrangement) -> None:
        """Lay out; KeyError if a read finds no instance."""
        self.arrangement = arrangement
        self._indexed = indexed
        self.steps, self.places = _merged(arrangement)
        events, ops = indexed.derived(events_of), np.array(self.steps, dtype=np.int64)
        self.spans = spans(events, ops)
        if not self.spans.all_made or not _finds_outputs(indexed, self.steps):
            raise KeyError("a read finds no instance")
        if indexed.total_nbytes < EXACT_NBYTES:
            live = live_nbytes(events, ops, self.spans) + indexed.problem.resident_nbytes
        else:
            live = np.array(measure(indexed, self.steps).live_nbytes, dtype=np.int64)
        self.live: Ints = live

    @property
    def peak_nbytes(self) -> int:
        """The highest live bytes of any step."""
        return int(self.live.max(initial=0))

    @cached_property
    def value(self) -> list[int]:
        """Per instance, its value."""
        found: list[int] = self.spans.value.tolist()
        return found

    @cached_property
    def born(self) -> list[int]:
        """Per instance, the step that makes it."""
        found: list[int] = self.spans.born.tolist()
        return found

    @cached_property
    def last(self) -> list[int]:
        """Per instance, the last step at which it is live."""
        found: list[int] = self.spans.last.tolist()
        return found

    @cached_property
    def _made(self) -> list[int]:
        return [*self.spans.made.tolist(), len(self.spans.step)]

    def reads(self, instance: int) -> list[int]:
        """The steps that read an instance; not noted for outputs of the problem."""
        first, end = self._made[instance : instance + 2]
        found: list[int] = self.spans.step[first + 1 : end].tolist()
        return found

    def before(self, value: int, step: int) -> int | None:
        """The latest instance of a value that is made before a step."""
        low, high = self._first[value], self._first[value + 1]
        place = bisect_left(self.born, step, low, high)
        return place - 1 if place > low else None

    def next_run(self, op: int, step: int) -> int | None:
        """The first step after another one that runs an operation; None if there is none."""
        for v in self._indexed.outputs[op]:
            low, high = self._first[v], self._first[v + 1]
            place = bisect_left(self.born, step + 1, low, high)
            return self.born[place] if place < high else None
        return None

    @cached_property
    def _first(self) -> list[int]:
        """Per value its first instance, and one past the last of all."""
        numbers = np.arange(len(self._indexed.nbytes) + 1)
        found: list[int] = np.searchsorted(self.spans.value, numbers).tolist()
        return found

    def rerun_steps(self) -> dict[tuple[int, int], int]:
        """Per rerun, as (operation, before), its step."""
        found: dict[tuple[int, int], int] = {}
        before = 0  # reruns so far
        for place, op in _rerun_places(self.arrangement):
            again = self.arrangement.reruns[op]
            found |= {(one, op): step for step, one in enumerate(again, place + before)}
            before += len(again)
        return found


def _outputs_read(indexed: Indexed) -> dict[int, list[int]]:
    """Per operation that reads outputs of the problem, who makes these; none with phases.

    There the order of first runs is fixed.
    """
    if Phase.ANY not in indexed.phase:
        return {}
    found = {
        op: [indexed.producer[v] for v in values if indexed.pinned[v]]
        for op, values in enumerate(indexed.inputs)
    }
    return {op: makers for op, makers in found.items() if makers}


def _finds_outputs(indexed: Indexed, steps: list[int]) -> bool:
    """Whether what reads an output of the problem comes after its making."""
    makers = indexed.derived(_outputs_read)
    seen: set[int] = set()
    for op in steps if makers else ():
        if not seen.issuperset(makers.get(op, ())):
            return False
        seen.add(op)
    return True


def _merged(arrangement: Arrangement) -> tuple[list[int], list[int]]:
    """The steps, and per step the place in the order: slice by slice, as reruns are few."""
    steps: list[int] = []
    places: list[int] = []
    done = 0
    for place, op in _rerun_places(arrangement):
        again = arrangement.reruns[op]
        steps += [*arrangement.order[done:place], *again]
        places += [*range(done, place), *[place] * len(again)]
        done = place
    return [*steps, *arrangement.order[done:]], [*places, *range(done, len(arrangement.order))]


def _rerun_places(arrangement: Arrangement) -> list[tuple[int, int]]:
    """The operations that others run again for, each with its place, in their order."""
    place = arrangement.order.place
    return sorted((place[op], op) for op in arrangement.reruns if op in place)
