"""THE definition of live bytes and time of a plan.

Enters: a problem and a plan. Leaves: a `Timeline`. Every other module quotes this one;
`check` alone computes the same naively, to disagree with it where it can.
Runs in time linear in the number of reads. `measure` is the same over numbers (`Indexed`), for
callers that simulate one problem many times.
"""

from __future__ import annotations

import math
from itertools import accumulate

from autoremat_solver.model.indexed import Indexed, index
from autoremat_solver.plan import Plan, Timeline
from autoremat_solver.problem import Problem
from autoremat_solver.regions import unrolled, unrolled_plan

Span = tuple[int, int, int]


def simulate(problem: Problem, plan: Plan) -> Timeline:
    """Live bytes while each step of the plan runs, and the time of all steps together.

    With regions these are the steps of `unrolled_plan`.

    Args:
        problem: the step.
        plan: steps over the problem's operations in which every read finds an instance.

    Raises:
        KeyError: if a step names an unknown operation or reads a value not yet made.
        ValueError: if a step is not of the kind that it says.
        ProblemError: if the steps of a region do not stand together.
    """
    indexed = index(unrolled(problem))
    return measure(indexed, indexed.numbers(unrolled_plan(problem, plan)))


def measure(indexed: Indexed, steps: list[int]) -> Timeline:
    """`simulate` for a schedule of operation numbers."""
    nbytes = indexed.nbytes
    change = [0] * (len(steps) + 1)
    spans = spans_of(indexed, steps)
    for value, born, last_read in spans:
        change[born] += nbytes[value]
        change[last_read + 1] -= nbytes[value]
    for step, (value, _, _) in taken_over(indexed, steps, spans).items():
        change[step] -= nbytes[value]
        change[step + 1] += nbytes[value]
    live = list(accumulate(change[:-1], initial=indexed.problem.resident_nbytes))[1:]
    workspace = indexed.workspace_nbytes
    live = [nbytes + workspace[op] for nbytes, op in zip(live, steps, strict=True)]
    return Timeline(tuple(live), math.fsum(indexed.time_us[op] for op in steps))


def spans_of(indexed: Indexed, steps: list[int]) -> list[Span]:
    """Every instance of a value as (value, step that makes it, last step at which it is live)."""
    pinned, inputs, outputs = indexed.pinned, indexed.inputs, indexed.outputs
    end = len(steps) - 1
    born: dict[int, int] = {}
    last_read: dict[int, int] = {}
    spans: list[Span] = []
    for step, op in enumerate(steps):
        for value in inputs[op]:
            if value not in born:
                raise KeyError(indexed.problem.values[value].name)
            if not pinned[value]:
                last_read[value] = step
        for value in outputs[op]:
            if value in born:
                if pinned[value]:
                    spans.append((value, step, step))
                    continue
                spans.append((value, born[value], last_read[value]))
            born[value] = step
            last_read[value] = end if pinned[value] else step
    spans.extend((value, born[value], last_read[value]) for value in born)
    return spans


def saved_of(indexed: Indexed, steps: list[int], spans: list[Span] | None = None) -> list[int]:
    """Values whose forward instance the backward reads, sorted."""
    backward = indexed.is_backward
    start = next((step for step, op in enumerate(steps) if backward[op]), len(steps))
    spans = spans_of(indexed, steps) if spans is None else spans
    crossing = {value for value, born, last in spans if born < start <= last}
    read = {value for op in steps[start:] for value in indexed.inputs[op]}
    return sorted(v for v in crossing if not indexed.pinned[v] or v in read)


def instance_spans(problem: Problem, plan: Plan) -> list[tuple[str, int, int]]:
    """Every instance of a value as (value, step that makes it, last step at which it is live)."""
    indexed = index(problem)
    spans = spans_of(indexed, indexed.numbers(plan))
    return [(problem.values[value].name, born, last) for value, born, last in spans]


def occupied_spans(problem: Problem, plan: Plan) -> list[tuple[str, int, int]]:
    """The same, but for what is written over: from that step on its memory is the result's.

    So bytes of these spans and workspaces of operations add up to what is live at each step.
    """
    indexed = index(problem)
    steps = indexed.numbers(plan)
    spans = spans_of(indexed, steps)
    taken = set(taken_over(indexed, steps, spans).values())
    return [(problem.values[span[0]].name, span[1], span[2] - (span in taken)) for span in spans]


def taken_over(indexed: Indexed, steps: list[int], spans: list[Span]) -> dict[int, Span]:
    """By step, the instance that is written over there: it ends, and the results have room."""
    found: dict[int, Span] = {}
    for span in spans if any(indexed.overwrites) else ():
        value, _, last = span
        op = steps[last]
        if value in indexed.overwrites[op] and not indexed.pinned[value]:
            room_nbytes = sum(indexed.nbytes[made] for made in indexed.outputs[op])
            least_nbytes = indexed.nbytes[found[last][0]] if last in found else 0
            if least_nbytes < indexed.nbytes[value] <= room_nbytes:
                found[last] = span
    return found


def backward_start(problem: Problem, plan: Plan) -> int:
    """Index of the first backward step; the number of steps if there is none."""
    return problem.first_backward(plan.schedule)


def saved_values(
    problem: Problem, plan: Plan, spans: list[tuple[str, int, int]] | None = None
) -> frozenset[str]:
    """Values whose forward instance the backward reads.

    Args:
        problem: the step.
        plan: a plan of it.
        spans: `instance_spans` of the two, if the caller has them already.
    """
    start = backward_start(problem, plan)
    spans = instance_spans(problem, plan) if spans is None else spans
    pinned = frozenset(problem.outputs)
    crossing = {name for name, born, last in spans if born < start <= last}
    read = {name for step in plan.steps[start:] for name in problem.op_by_name[step.target].inputs}
    return frozenset(name for name in crossing if name not in pinned or name in read)
