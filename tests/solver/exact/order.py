"""States of the exhaustive search over a graph without phases.

Enters: an `Indexed` problem whose operations are all ANY. Leaves: what `exact` asks for: states
(operations that ran, values held) and how one leads to the next. First runs come in any order and
cost nothing, since every plan has them; runs after the first cost their time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from autoremat_solver.model.indexed import Indexed

from tests.solver.exact.value_sets import ValueSets, bits, mask, union


class State(NamedTuple):
    """Where a schedule stands.

    Attributes:
        ran: operations that ran, as a bit mask.
        held: values that a read would find, as a bit mask.
    """

    ran: int
    held: int


class UnphasedStates:
    """The states of one problem.

    Args:
        indexed: the graph.
    """

    def __init__(self, indexed: Indexed) -> None:
        """Compute what no budget changes."""
        ops = range(len(indexed.phase))
        self._indexed = indexed
        self._all = mask(ops)
        self._reads = [mask(indexed.inputs[op]) for op in ops]
        self._makes = [mask(indexed.outputs[op]) for op in ops]
        self._pinned = mask(v for v, pinned in enumerate(indexed.pinned) if pinned)
        self._once = mask(op for op in ops if not indexed.problem.ops[op].recomputable)
        self._sets = ValueSets(indexed.nbytes)
        self._wanted_after: dict[int, int] = {}

    @property
    def start(self) -> State:
        """Before the first operation."""
        return State(0, 0)

    def is_end(self, state: State) -> bool:
        """Whether every operation ran; then all outputs of the problem are there."""
        return state.ran == self._all

    def parts(self, state: State) -> tuple[int, int]:
        """What ran, and what is held."""
        return state.ran, state.held

    def left_to_run(self, state: State) -> int:
        """Operations that did not run yet."""
        return (self._all & ~state.ran).bit_count()

    def to_pay(self, state: State) -> float:
        """Time of the reruns that any end of the schedule has, at least.

        Infinite if one of them is not allowed.
        """
        indexed = self._indexed
        again, total_us = 0, 0.0
        stack = self._lost(state, self._to_read(state.ran))
        while stack:
            op = indexed.producer[stack.bit_length() - 1]
            stack &= ~self._makes[op]
            if self._once >> op & 1:
                return math.inf
            again |= self._makes[op]
            total_us += indexed.time_us[op]
            stack |= self._lost(state, self._reads[op]) & ~again
        return total_us

    def successors(self, state: State, room_nbytes: int) -> Iterator[tuple[int, float, State]]:
        """Operation, what it adds to the cost, and the state after it, for all that fit."""
        moves = list(self._moves(state))
        for op in moves:
            if self._is_for_free(state, op, room_nbytes):
                yield op, 0.0, self._after(state, op, state.held)
                return
        for op in moves:
            cost_us = self._indexed.time_us[op] if state.ran >> op & 1 else 0.0
            droppable = self._beside(state, op) & ~self._pinned & ~self._reads[op]
            for dropped in self._sets.least_sets(droppable, self._excess(state, op, room_nbytes)):
                yield op, cost_us, self._after(state, op, state.held & ~dropped)

    def _moves(self, state: State) -> Iterator[int]:
        """Operations that may run next and change something."""
        missing = self._wanted(state.ran) & ~state.held
        for op, reads in enumerate(self._reads):
            if reads & ~state.held:
                continue
            ran = state.ran >> op & 1
            if not ran or (self._makes[op] & missing and not self._once >> op & 1):
                yield op

    def _is_for_free(self, state: State, op: int, room_nbytes: int) -> bool:
        """Whether a first run now is as good as any later one: it fits and leaves no bytes."""
        if state.ran >> op & 1 or self._excess(state, op, room_nbytes) > 0:
            return False
        left = self._makes[op] & (self._wanted(state.ran | 1 << op) | self._pinned)
        return not self._sets.nbytes(left)

    def _beside(self, state: State, op: int) -> int:
        """What is live while the operation runs, what it makes not counted.

        Instances that it replaces had their last read; those of the problem's outputs stay.
        """
        return state.held & ~(self._makes[op] & ~self._pinned)

    def _excess(self, state: State, op: int, room_nbytes: int) -> int:
        own_nbytes = self._sets.nbytes(self._makes[op]) + self._indexed.workspace_nbytes[op]
        return self._sets.nbytes(self._beside(state, op)) + own_nbytes - room_nbytes

    def _after(self, state: State, op: int, held: int) -> State:
        ran = state.ran | 1 << op
        return State(ran, (held | self._makes[op]) & (self._wanted(ran) | self._pinned))

    def _to_read(self, ran: int) -> int:
        """What first runs still read."""
        return union(self._reads[op] for op in bits(self._all & ~ran))

    def _lost(self, state: State, values: int) -> int:
        """Those of the values that were made and are not held."""
        return mask(
            v for v in bits(values & ~state.held) if state.ran >> self._indexed.producer[v] & 1
        )

    def _wanted(self, ran: int) -> int:
        """What first runs still read, and reruns for them may."""
        known = self._wanted_after.get(ran)
        if known is None:
            known = stack = self._to_read(ran)
            while stack:
                v = stack.bit_length() - 1
                stack ^= 1 << v
                op = self._indexed.producer[v]
                if not (self._once >> op & 1 or self._pinned >> v & 1):
                    new = self._reads[op] & ~known
                    known |= new
                    stack |= new
            self._wanted_after[ran] = known
        return known
