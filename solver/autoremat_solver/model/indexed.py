"""A problem with integers in place of names, for the loops that run many thousand times.

Enters: a `Problem`. Leaves: an `Indexed`, the same facts as lists over operation and value
numbers, plus the one order in which the non-backward operations run (in the forward and again
when several of them are recomputed together). It adds no meaning of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from autoremat_solver.model.readable import Reading, reading_of
from autoremat_solver.plan import Plan
from autoremat_solver.problem import Phase, Problem, ProblemError

T = TypeVar("T")


@dataclass(frozen=True)
class Indexed:
    """A problem over operation numbers (order of `Problem.ops`) and value numbers.

    Attributes:
        problem: where all of this comes from.
        inputs: per operation, the values it reads, each once.
        outputs: per operation, the values it makes.
        time_us: per operation.
        workspace_nbytes: per operation.
        phase: per operation.
        nbytes: per value.
        producer: per value, the operation that makes it.
        pinned: per value, whether it is one of the problem's outputs.
        overwrites: per operation, the values that it may write over.
    """

    problem: Problem
    inputs: list[tuple[int, ...]]
    outputs: list[tuple[int, ...]]
    time_us: list[float]
    workspace_nbytes: list[int]
    phase: list[Phase]
    nbytes: list[int]
    producer: list[int]
    pinned: list[bool]
    overwrites: list[tuple[int, ...]]
    _derived: dict[Callable[..., Any], Any] = field(default_factory=dict, repr=False, compare=False)

    def derived(self, make: Callable[[Indexed], T]) -> T:
        """`make(self)`, computed once: for modules that prepare tables of their own."""
        if make not in self._derived:
            self._derived[make] = make(self)
        found: T = self._derived[make]
        return found

    @cached_property
    def total_nbytes(self) -> int:
        """Bytes of all values together."""
        return sum(self.nbytes)

    @cached_property
    def least_extra_nbytes(self) -> list[int]:
        """Per operation, what it takes at least beside what it reads and makes.

        Below 0 where it may write over what it reads: under plans that need that no more.
        """
        problem = self.problem
        may_end = problem.value_by_name.keys() - set(problem.outputs)
        return [op.workspace_nbytes - problem.taken_nbytes(op, may_end) for op in problem.ops]

    @cached_property
    def backward_ops(self) -> list[int]:
        """The backward in its fixed order; an index into it is a backward position."""
        return [op for op, phase in enumerate(self.phase) if phase is Phase.BACKWARD]

    @cached_property
    def is_backward(self) -> list[bool]:
        """Per operation."""
        return [phase is Phase.BACKWARD for phase in self.phase]

    @cached_property
    def forward_order(self) -> list[int]:
        """All but BACKWARD operations, in an order that runs them before the backward.

        An EITHER operation that the problem lists inside the backward moves to right after the
        last of its inputs is made, so that it keeps nothing alive that it does not need.
        """
        first_backward = self.backward_ops[0] if self.backward_ops else len(self.phase)
        key: list[tuple[int, int]] = [(0, 0)] * len(self.phase)
        for op, phase in enumerate(self.phase):
            if op < first_backward:
                key[op] = (op, 0)
            elif phase is not Phase.BACKWARD:
                after = max((key[self.producer[v]][0] for v in self.inputs[op]), default=-1)
                key[op] = (after, op)
        movable = [op for op in range(len(self.phase)) if not self.is_backward[op]]
        return sorted(movable, key=key.__getitem__)

    @cached_property
    def rank(self) -> list[int]:
        """Per operation its place in `forward_order`; -1 for backward operations."""
        rank = [-1] * len(self.phase)
        for place, op in enumerate(self.forward_order):
            rank[op] = place
        return rank

    @cached_property
    def reading(self) -> Reading:
        """Which instances of a value the backward may read."""
        return reading_of(self)

    @property
    def rerunnable(self) -> list[bool]:
        """Per operation, whether a second run is allowed."""
        return self.reading.rerunnable

    @property
    def forced(self) -> list[bool]:
        """Per value, whether the backward can read no other instance than the forward's."""
        return self.reading.forced

    @property
    def barred(self) -> list[bool]:
        """Per value, whether the backward must not read the forward's instance."""
        return self.reading.barred

    @cached_property
    def readers(self) -> list[list[int]]:
        """Per value, the operations that read it."""
        return self._places(self.inputs)

    @cached_property
    def demands(self) -> list[tuple[int, ...]]:
        """Per backward position, the non-backward values that must exist when it runs."""
        extra: dict[int, list[int]] = {}
        position = 0
        for op, phase in enumerate(self.phase):
            if phase is Phase.BACKWARD:
                position += 1
            elif phase is Phase.EITHER and (position > 0 or op in self.reading.late):
                pinned = [v for v in self.outputs[op] if self.pinned[v]]
                last = len(self.backward_ops) - 1
                extra.setdefault(min(max(position, 1), last), []).extend(pinned)
        return [
            tuple(v for v in self.inputs[op] if not self.is_backward[self.producer[v]])
            + tuple(extra.get(position, ()))
            for position, op in enumerate(self.backward_ops)
        ]

    @cached_property
    def always_forward(self) -> list[int]:
        """Operations that run in the forward whatever is saved."""
        first_backward = self.backward_ops[0] if self.backward_ops else len(self.phase)
        wanted = [
            op
            for op, phase in enumerate(self.phase)
            if phase is Phase.EITHER
            and op < first_backward
            and op not in self.reading.late
            and any(self.pinned[v] for v in self.outputs[op])
        ]
        forward = (Phase.FORWARD, Phase.ANY)
        return [op for op, phase in enumerate(self.phase) if phase in forward] + wanted

    @cached_property
    def last_demand(self) -> list[int]:
        """Per value the last backward position that reads it directly; -1 if none does."""
        return [positions[-1] if positions else -1 for positions in self.demanded_at]

    @cached_property
    def first_demand(self) -> list[int]:
        """Per value the first backward position that reads it directly; -1 if none does."""
        return [positions[0] if positions else -1 for positions in self.demanded_at]

    @cached_property
    def demanded(self) -> list[int]:
        """Values that the backward reads directly, ascending."""
        return sorted({v for values in self.demands for v in values})

    @cached_property
    def has_either(self) -> bool:
        """Whether some operation may run first in the forward or in the backward."""
        return Phase.EITHER in self.phase

    @cached_property
    def made_either(self) -> list[bool]:
        """Per value, whether an EITHER operation makes it."""
        return [self.phase[op] is Phase.EITHER for op in self.producer]

    @cached_property
    def early_either(self) -> list[int]:
        """EITHER operations that run in the forward whatever is saved."""
        return [op for op in self.always_forward if self.phase[op] is Phase.EITHER]

    @cached_property
    def demanded_at(self) -> list[list[int]]:
        """Per value the backward positions that read it directly, ascending."""
        return self._places(self.demands)

    def _places(self, lists: list[tuple[int, ...]]) -> list[list[int]]:
        """Per value the places of the lists that have it, ascending."""
        places: list[list[int]] = [[] for _ in self.nbytes]
        for place, values in enumerate(lists):
            for v in values:
                places[v].append(place)
        return places

    @cached_property
    def from_forward(self) -> list[int]:
        """Values of which the backward reads the forward's instance whatever is saved."""
        pinned = [v for op in self.always_forward for v in self.outputs[op] if self.pinned[v]]
        forced = (v for v, forced in enumerate(self.forced) if forced)
        return list(dict.fromkeys([*forced, *pinned]))

    @cached_property
    def candidates(self) -> list[int]:
        """Values that the backward reads or that recomputing such a value may read."""
        found = {v for values in self.demands for v in values}
        stack = list(found)
        while stack:
            op = self.producer[stack.pop()]
            if self.rerunnable[op] or self.phase[op] is Phase.EITHER:
                new = [v for v in self.inputs[op] if v not in found]
                found.update(new)
                stack.extend(new)
        return sorted(found)

    def numbers(self, plan: Plan) -> list[int]:
        """Numbers of the operations that a plan runs, in its order.

        Raises:
            KeyError: if a step names an unknown operation.
            ValueError: if a step is a first run of what ran before, or a recompute of what did not.
        """
        runs = [step for step in plan.steps if step.is_run]
        for step, right in zip(runs, Plan.of(plan.schedule).steps, strict=True):
            if step != right:
                raise ValueError(f"The {step.kind} of {step.target!r} is a {right.kind}.")
        number = {op.name: i for i, op in enumerate(self.problem.ops)}
        return [number[step.target] for step in runs]

    def plan(self, steps: list[int]) -> Plan:
        """The plan that runs operations of these numbers in this order."""
        return Plan.of(self.problem.ops[op].name for op in steps)


def index(problem: Problem) -> Indexed:
    """The problem over numbers. Linear in the number of reads.

    Raises:
        ProblemError: if the problem has regions.
    """
    if problem.regions:
        raise ProblemError(
            f"The problem states the region {problem.regions[0].name!r} once, and what is asked "
            "for needs every run by itself: give `unrolled(problem)`."
        )
    number = {value.name: i for i, value in enumerate(problem.values)}
    pinned = frozenset(problem.outputs)
    producer = [0] * len(problem.values)
    for i, op in enumerate(problem.ops):
        for name in op.outputs:
            producer[number[name]] = i
    return Indexed(
        problem=problem,
        inputs=[tuple(dict.fromkeys(number[name] for name in op.inputs)) for op in problem.ops],
        outputs=[tuple(number[name] for name in op.outputs) for op in problem.ops],
        time_us=[op.time_us for op in problem.ops],
        workspace_nbytes=[op.workspace_nbytes for op in problem.ops],
        overwrites=[tuple(number[name] for name in op.overwrites) for op in problem.ops],
        phase=[op.phase for op in problem.ops],
        nbytes=[value.nbytes for value in problem.values],
        producer=producer,
        pinned=[value.name in pinned for value in problem.values],
    )
