"""States of the exhaustive search over a step with a forward and a backward.

Enters: an `Indexed` problem whose operations have phases. Leaves: what `exact` asks for: states
(mandatory operations done, values held) and how one leads to the next. Forward operations run
once in the forward and backward ones once in the backward, in their order; between them any
operation may run that `check` allows to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from autoremat_solver.model.indexed import Indexed
from autoremat_solver.problem import Phase

from tests.solver.exact.value_sets import ValueSets, bits, mask, union


class State(NamedTuple):
    """Where a schedule stands; sets of values and operations are bit masks.

    Attributes:
        done: mandatory operations that ran.
        readable: values of which a read would find a permitted instance.
        kept: outputs of the problem that are made, readable or not; they stay.
        ran: operations that may run only once at a time of their choice, and did.
    """

    done: int
    readable: int
    kept: int
    ran: int


class PhasedStates:
    """The states of one problem.

    Args:
        indexed: the step.
    """

    def __init__(self, indexed: Indexed) -> None:
        """Compute what no budget changes."""
        self._indexed = indexed
        phase, ops = indexed.phase, range(len(indexed.phase))
        values = indexed.problem.values
        mandatory = [op for op in ops if phase[op] is Phase.FORWARD]
        self._start = len(mandatory) if indexed.backward_ops else len(mandatory) + 1
        self._mandatory = mandatory + indexed.backward_ops
        self._reads = [mask(indexed.inputs[op]) for op in ops]
        self._makes = [mask(indexed.outputs[op]) for op in ops]
        self._pinned = mask(v for v, pinned in enumerate(indexed.pinned) if pinned)
        late = [phase[indexed.producer[v]] is not Phase.BACKWARD for v in range(len(values))]
        self._must_save = mask(v for v, x in enumerate(values) if x.must_save and late[v])
        self._must_recompute = mask(v for v, x in enumerate(values) if x.must_recompute and late[v])
        self._free_to_repeat = [
            op
            for op in ops
            if phase[op] is Phase.EITHER
            or (indexed.problem.ops[op].recomputable and phase[op] is not Phase.BACKWARD)
        ]
        self._once = mask(op for op in ops if not indexed.problem.ops[op].recomputable)
        self._useful = [self._useful_from(done) for done in range(len(self._mandatory) + 1)]
        self._to_come = [
            union(self._makes[op] for op in self._mandatory[done:])
            for done in range(len(self._mandatory) + 1)
        ]
        self._to_read = [
            union(self._reads[op] for op in self._mandatory[done:])
            for done in range(len(self._mandatory) + 1)
        ]
        self._due = [self._due_from(done) for done in range(len(self._mandatory) + 1)]
        self._sets = ValueSets(indexed.nbytes)

    @property
    def start(self) -> State:
        """Before the first operation."""
        return State(0, 0, 0, 0)

    def parts(self, state: State) -> tuple[tuple[int, int, int], int]:
        """What ran and what stays, and what can be read."""
        return (state.done, state.kept, state.ran), state.readable

    def left_to_run(self, state: State) -> int:
        """Mandatory operations that did not run yet."""
        return len(self._mandatory) - state.done

    def successors(self, state: State, room_nbytes: int) -> Iterator[tuple[int, float, State]]:
        """Operation, what it adds to the cost, and the state after it, for all that fit."""
        for op in self._moves(state):
            is_next = self._is_next(state, op)
            origin = self._entering_backward(state) if is_next else state
            if self._reads[op] & ~origin.readable:
                continue
            for new in self._runs(origin, op, room_nbytes):
                yield op, 0.0 if is_next else self._indexed.time_us[op], new

    def is_end(self, state: State) -> bool:
        """Whether all mandatory operations ran and all outputs of the problem are made."""
        return state.done == len(self._mandatory) and state.kept == self._pinned

    def _moves(self, state: State) -> Iterator[int]:
        """Operations that may run next and change something."""
        if state.done < len(self._mandatory):
            op = self._mandatory[state.done]
            if not self._reads[op] & ~state.readable:
                yield op
        missing = ~(state.readable | state.kept) & self._useful[state.done]
        for op in self._free_to_repeat:
            if (
                self._makes[op] & missing
                and not self._reads[op] & ~state.readable
                and self._may_repeat(state, op)
            ):
                yield op

    def _may_repeat(self, state: State, op: int) -> bool:
        phase = self._indexed.phase[op]
        if phase is Phase.EITHER:
            return not state.ran >> op & 1
        return state.done > self._start

    def _is_next(self, state: State, op: int) -> bool:
        """Whether the operation is the mandatory one whose turn it is."""
        return state.done < len(self._mandatory) and op == self._mandatory[state.done]

    def _entering_backward(self, state: State) -> State:
        """Before the first backward operation, what must be recomputed is given up."""
        if state.done != self._start:
            return state
        return state._replace(readable=state.readable & ~self._must_recompute)

    def _held(self, state: State, op: int) -> int:
        """What is live when the operation starts, old instances of its outputs not counted."""
        return (state.readable & ~(self._makes[op] & ~self._pinned)) | state.kept

    def _own_nbytes(self, op: int) -> int:
        return self._sets.nbytes(self._makes[op]) + self._indexed.workspace_nbytes[op]

    def _runs(self, state: State, op: int, room_nbytes: int) -> Iterator[State]:
        """States after the operation, one per least set of values that makes room for it."""
        held = self._held(state, op)
        excess = self._sets.nbytes(held) + self._own_nbytes(op) - room_nbytes
        droppable = held & ~state.kept & ~self._reads[op]
        for dropped in self._sets.least_sets(droppable, excess):
            yield self._after(state, op, state.readable & ~dropped)

    def _after(self, state: State, op: int, readable: int) -> State:
        is_next = self._is_next(state, op)
        done = state.done + 1 if is_next else state.done
        in_backward = done > self._start
        made = self._makes[op]
        banned = self._must_save if in_backward and not is_next else 0
        first_made = made & ~state.kept
        readable = (readable & ~first_made) | (first_made & ~banned)
        ran = state.ran if is_next else state.ran | (1 << op & self._once)
        return State(
            done,
            readable & (self._useful[done] | self._pinned),
            state.kept | (made & self._pinned),
            ran,
        )

    def to_pay(self, state: State) -> float:
        """Time of the runs that any end of the schedule has beside the mandatory ones, at least.

        Infinite if one of them is not allowed.
        """
        indexed = self._indexed
        if self._due[state.done] & ~state.readable:
            return math.inf
        have = state.readable | self._to_come[state.done]
        stack = self._to_read[state.done] | (self._pinned & ~state.kept)
        stack &= ~have
        seen, total = stack, 0.0
        counted = 0
        while stack:
            v = (stack & -stack).bit_length() - 1
            stack &= stack - 1
            op = indexed.producer[v]
            if not self._can_still_make(state, v):
                return math.inf
            if counted >> op & 1:
                continue
            counted |= 1 << op
            total += indexed.time_us[op]
            new = self._reads[op] & ~have & ~seen
            seen |= new
            stack |= new
        return total

    def _can_still_make(self, state: State, v: int) -> bool:
        """Whether a run beside the mandatory ones can make a permitted instance of the value."""
        op, bit = self._indexed.producer[v], 1 << v
        if self._indexed.phase[op] is Phase.BACKWARD or state.ran >> op & 1:
            return False
        if self._indexed.phase[op] is not Phase.EITHER and self._once >> op & 1:
            return False
        if state.kept & bit:
            return False
        return not (state.done > self._start and self._must_save & bit and not self._pinned & bit)

    def _useful_from(self, done: int) -> int:
        """Values that anything may still want to read, and outputs of the problem."""
        indexed = self._indexed
        found = union(self._reads[op] for op in self._mandatory[done:]) | self._pinned
        stack = list(bits(found))
        while stack:
            op = indexed.producer[stack.pop()]
            if indexed.phase[op] is Phase.BACKWARD:
                continue
            new = self._reads[op] & ~found
            found |= new
            stack.extend(bits(new))
        return found

    def _due_from(self, done: int) -> int:
        """Values made already that the rest of the forward reads: nothing makes them in time."""
        if done > self._start:
            return 0
        made = union(self._makes[op] for op in self._mandatory[:done])
        rest = self._mandatory[done : self._start + 1]
        return made & union(self._reads[op] for op in rest)
