"""What a saved value is worth: the operations that would run again if it were not saved.

Enters: a problem and a plan of it. Leaves: for a value, a `Rerun`. The chain is the true one: the
producer, and the producers of those of its inputs that the plan has freed by then, and so on back
to what is live.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoremat_solver import Plan, Problem
from autoremat_solver.simulate import backward_start, instance_spans


@dataclass(frozen=True, slots=True)
class Rerun:
    """Making a value once more, right before the backward first reads it.

    Attributes:
        ops: the operations that would run again, as many as they are.
        time_us: their duration together.
        blocked_by: an operation among them that may not run again, or "" if all may.
    """

    ops: tuple[str, ...]
    time_us: float
    blocked_by: str = ""


class Alternatives:
    """Reruns of the values of one plan."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        """Find what is live when, and who reads what first in the backward."""
        self._problem = problem
        self._start = backward_start(problem, plan)
        self._spans: dict[str, list[tuple[int, int]]] = {}
        for name, born, last in instance_spans(problem, plan):
            self._spans.setdefault(name, []).append((born, last))
        self._first_read: dict[str, int] = {}
        for number, step in enumerate(plan.steps[self._start :], self._start):
            for name in problem.op_by_name[step.target].inputs if step.is_run else ():
                self._first_read.setdefault(name, number)

    def of(self, value: str) -> Rerun | None:
        """What making the value again would take; None if it is no value of the problem."""
        if value not in self._problem.value_by_name:
            return None
        step = self._first_read.get(value, self._start)
        ops: dict[str, float] = {}
        missing = [value]
        while missing:
            op = self._problem.producer_of[missing.pop()]
            if op.name in ops:
                continue
            ops[op.name] = op.time_us
            if not op.recomputable:
                return Rerun(tuple(ops), math.fsum(ops.values()), blocked_by=op.name)
            missing += [name for name in op.inputs if not self._is_live(name, step)]
        return Rerun(tuple(ops), math.fsum(ops.values()))

    def _is_live(self, value: str, step: int) -> bool:
        return any(born < step <= last for born, last in self._spans.get(value, ()))
