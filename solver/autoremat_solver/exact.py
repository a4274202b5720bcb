"""The cheapest plan of a small problem, by exhaustive search: proven, not bounded.

Enters: an `Indexed` problem and a budget. Leaves: the cheapest schedule within the budget, or the
proof that there is none, or `SearchLimit` if the problem is too large for it. The class of plans
is all that `check` accepts.

A* over states (mandatory operations done, values held). Forward operations run once in the
forward and backward ones once in the backward, in their order; between them any operation may run
that `check` allows to. Two facts keep the states few, and lose no plan:

- A value need not be dropped before its bytes are wanted. So everything is held until an operation
  does not fit, and then one least set of held values goes: a branch for each such set.
- What remaining operations read and nobody holds must be made again, and so must what that reads:
  the time of these runs is a lower bound on what is to come, whatever the budget.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from autoremat_solver.indexed import Indexed
from autoremat_solver.problem import Phase
from autoremat_solver.simulate import measure

MOST_OPS = 28
MOST_STATES = 10_000
NEVER = float("inf")


class SearchLimit(Exception):
    """The search was given up: nothing is known."""


class _State(NamedTuple):
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


class ExactSearch:
    """The search over one problem, for many budgets.

    Args:
        indexed: the step.
    """

    def __init__(self, indexed: Indexed) -> None:
        """Compute what no budget changes."""
        self._indexed = indexed
        phase, ops = indexed.phase, range(len(indexed.phase))
        values = indexed.problem.values
        mandatory = [op for op in ops if phase[op] in (Phase.FORWARD, Phase.ANY)]
        self._start = len(mandatory) if indexed.backward_ops else len(mandatory) + 1
        self._is_phaseless = Phase.ANY in phase
        self._mandatory = mandatory + indexed.backward_ops
        self._reads = [_mask(indexed.inputs[op]) for op in ops]
        self._makes = [_mask(indexed.outputs[op]) for op in ops]
        self._pinned = _mask(v for v, pinned in enumerate(indexed.pinned) if pinned)
        late = [phase[indexed.producer[v]] is not Phase.BACKWARD for v in range(len(values))]
        self._must_save = _mask(v for v, x in enumerate(values) if x.must_save and late[v])
        self._must_recompute = _mask(
            v for v, x in enumerate(values) if x.must_recompute and late[v]
        )
        self._priced = [v for v, us in enumerate(indexed.save_us) if us > 0 and late[v]]
        self._free_to_repeat = [
            op
            for op in ops
            if phase[op] is Phase.EITHER
            or (indexed.problem.ops[op].recomputable and phase[op] is not Phase.BACKWARD)
        ]
        self._once = _mask(op for op in ops if not indexed.problem.ops[op].recomputable)
        self._useful = [self._useful_from(done) for done in range(len(self._mandatory) + 1)]
        self._to_come = [
            _union(self._makes[op] for op in self._mandatory[done:])
            for done in range(len(self._mandatory) + 1)
        ]
        self._to_read = [
            _union(self._reads[op] for op in self._mandatory[done:])
            for done in range(len(self._mandatory) + 1)
        ]
        self._due = [self._due_from(done) for done in range(len(self._mandatory) + 1)]
        self._sizes: dict[int, int] = {0: 0}

    @classmethod
    def of(cls, indexed: Indexed) -> ExactSearch | None:
        """The search, if the problem is small enough to try it."""
        return cls(indexed) if len(indexed.phase) <= MOST_OPS else None

    def cheapest(self, budget_nbytes: int, deadline: float = NEVER) -> list[int] | None:
        """The cheapest schedule whose peak is at most the budget; None if there is none.

        Args:
            budget_nbytes: the peak allowed, resident bytes included.
            deadline: `time.monotonic()` at which to give up.

        Raises:
            SearchLimit: after `MOST_STATES` states, or at the deadline.
        """
        room = budget_nbytes - self._indexed.problem.resident_nbytes
        first = _State(0, 0, 0, 0)
        best = {first: 0.0}
        came_from: dict[_State, tuple[_State, int]] = {}
        order = itertools.count()
        queue = [(self._to_pay(first), next(order), 0.0, first)]
        expanded = 0
        while queue:
            _, _, paid, state = heapq.heappop(queue)
            if paid > best[state]:
                continue
            if self._is_end(state):
                return _path(came_from, state)
            expanded += 1
            if expanded > MOST_STATES or time.monotonic() > deadline:
                raise SearchLimit
            for op, cost_us, new in self._successors(state, room):
                cost = paid + cost_us
                if cost >= best.get(new, NEVER):
                    continue
                ahead = self._to_pay(new)
                if ahead < NEVER:
                    best[new] = cost
                    came_from[new] = (state, op)
                    heapq.heappush(queue, (cost + ahead, next(order), cost, new))
        return None

    def smallest(self, known_nbytes: int, deadline: float = NEVER) -> list[int]:
        """The cheapest schedule of the smallest peak.

        Args:
            known_nbytes: a peak that some schedule reaches.
            deadline: `time.monotonic()` at which to give up.

        Raises:
            SearchLimit: after `MOST_STATES` states for one budget, or at the deadline.
        """
        low, high = 0, known_nbytes
        while low < high:
            middle = (low + high) // 2
            steps = self.cheapest(middle, deadline)
            if steps is None:
                low = middle + 1
            else:
                high = measure(self._indexed, steps).peak_nbytes
        steps = self.cheapest(high, deadline)
        assert steps is not None, "the known peak is one that some schedule reaches"
        return steps

    def _successors(self, state: _State, room: int) -> Iterator[tuple[int, float, _State]]:
        """Operation, what it adds to the cost, and the state after it."""
        for op in self._moves(state):
            for cost_us, origin in self._origins(state, op):
                for new in self._runs(origin, op, room):
                    yield op, cost_us, new

    def _is_end(self, state: _State) -> bool:
        return state.done == len(self._mandatory) and state.kept == self._pinned

    def _moves(self, state: _State) -> Iterator[int]:
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

    def _may_repeat(self, state: _State, op: int) -> bool:
        phase = self._indexed.phase[op]
        if phase is Phase.EITHER:
            return not state.ran >> op & 1
        if phase is Phase.ANY:
            return op < state.done
        return state.done > self._start

    def _origins(self, state: _State, op: int) -> Iterator[tuple[float, _State]]:
        """The state in which the operation starts to run, and what that costs.

        A run beside the mandatory ones costs its time. Before the first backward operation one
        has to say which values are saved; the others are given up.
        """
        indexed = self._indexed
        is_next = state.done < len(self._mandatory) and op == self._mandatory[state.done]
        if not is_next:
            yield indexed.time_us[op], state
            return
        if state.done != self._start:
            yield 0.0, state
            return
        readable = state.readable & ~self._must_recompute
        if self._reads[op] & ~readable:
            return
        free = [v for v in self._priced if readable >> v & 1 and not self._reads[op] >> v & 1]
        paid = sum(indexed.save_us[v] for v in self._priced if self._reads[op] >> v & 1)
        for count in range(len(free) + 1):
            for dropped in itertools.combinations(free, count):
                saving = sum(indexed.save_us[v] for v in free if v not in dropped)
                left = readable & ~_mask(dropped)
                yield paid + saving, _State(state.done, left, state.kept, state.ran)

    def _held(self, state: _State, op: int) -> int:
        """What is live when the operation starts, old instances of its outputs not counted."""
        return (state.readable & ~(self._makes[op] & ~self._pinned)) | state.kept

    def _own_nbytes(self, op: int) -> int:
        return self._nbytes(self._makes[op]) + self._indexed.workspace_nbytes[op]

    def _runs(self, state: _State, op: int, room_nbytes: int) -> Iterator[_State]:
        """States after the operation, one per least set of values that makes room for it."""
        held = self._held(state, op)
        excess = self._nbytes(held) + self._own_nbytes(op) - room_nbytes
        droppable = held & ~state.kept & ~self._reads[op]
        for dropped in self._least_sets(droppable, excess):
            yield self._after(state, op, state.readable & ~dropped)

    def _after(self, state: _State, op: int, readable: int) -> _State:
        is_next = state.done < len(self._mandatory) and op == self._mandatory[state.done]
        done = state.done + 1 if is_next else state.done
        in_backward = done > self._start
        made = self._makes[op]
        banned = self._must_save if in_backward and not is_next else 0
        first_made = made & ~state.kept
        readable = (readable & ~first_made) | (first_made & ~banned)
        ran = state.ran if is_next else state.ran | (1 << op & self._once)
        return _State(
            done,
            readable & (self._useful[done] | self._pinned),
            state.kept | (made & self._pinned),
            ran,
        )

    def _to_pay(self, state: _State) -> float:
        """Time of the runs that any end of the schedule has beside the mandatory ones, at least.

        Infinite if one of them is not allowed.
        """
        indexed = self._indexed
        if self._due[state.done] & ~state.readable:
            return NEVER
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
                return NEVER
            if counted >> op & 1:
                continue
            counted |= 1 << op
            total += indexed.time_us[op]
            new = self._reads[op] & ~have & ~seen
            seen |= new
            stack |= new
        return total

    def _can_still_make(self, state: _State, v: int) -> bool:
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
        found = _union(self._reads[op] for op in self._mandatory[done:]) | self._pinned
        stack = list(_bits(found))
        while stack:
            op = indexed.producer[stack.pop()]
            if indexed.phase[op] is Phase.BACKWARD:
                continue
            new = self._reads[op] & ~found
            found |= new
            stack.extend(_bits(new))
        return found

    def _due_from(self, done: int) -> int:
        """Values made already that the rest of the forward reads: nothing makes them in time."""
        if self._is_phaseless or done > self._start:
            return 0
        made = _union(self._makes[op] for op in self._mandatory[:done])
        rest = self._mandatory[done : self._start + 1]
        return made & _union(self._reads[op] for op in rest)

    def _nbytes(self, values: int) -> int:
        known = self._sizes.get(values)
        if known is None:
            lowest = values & -values
            rest = self._nbytes(values ^ lowest)
            known = rest + self._indexed.nbytes[lowest.bit_length() - 1]
            self._sizes[values] = known
        return known

    def _least_sets(self, values: int, nbytes: int) -> Iterator[int]:
        """Sets of values that have the bytes together and would not without any one of them."""
        if nbytes <= 0:
            yield 0
            return
        sizes = self._indexed.nbytes
        members = sorted((v for v in _bits(values) if sizes[v]), key=lambda v: (-sizes[v], v))
        left_after = list(itertools.accumulate((sizes[v] for v in members[::-1]), initial=0))[::-1]
        # Largest first: the set is least if the last one taken, its smallest, is needed.
        stack = [(0, 0, 0)]
        while stack:
            place, chosen, have = stack.pop()
            if have + left_after[place] < nbytes:
                continue
            v = members[place]
            if have + sizes[v] >= nbytes:
                yield chosen | 1 << v
            else:
                stack.append((place + 1, chosen | 1 << v, have + sizes[v]))
            stack.append((place + 1, chosen, have))


def _path(came_from: dict[_State, tuple[_State, int]], state: _State) -> list[int]:
    steps = []
    while state in came_from:
        state, op = came_from[state]
        steps.append(op)
    return steps[::-1]


def _mask(bits: Iterable[int]) -> int:
    return _union(1 << bit for bit in bits)


def _union(masks: Iterable[int]) -> int:
    result = 0
    for mask in masks:
        result |= mask
    return result


def _bits(mask: int) -> Iterator[int]:
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1
