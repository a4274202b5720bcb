"""THE definition of live bytes and time of a plan.

Enters: a problem and a plan. Leaves: a `Timeline`. Every other module quotes this one;
`check` alone computes the same naively, to disagree with it where it can.
Runs in time linear in the number of reads. `measure` is the same over numbers (`Indexed`), for
callers that simulate one problem many times.
"""

from __future__ import annotations

import math
from itertools import accumulate

from autoremat_solver.model.copies import computing_us, copy_of, numbers_with_copies, with_copies
from autoremat_solver.model.indexed import Indexed, index
from autoremat_solver.plan import Plan, StepKind, Timeline
from autoremat_solver.problem import Problem
from autoremat_solver.regions import unrolled, unrolled_plan

Span = tuple[int, int, int]


def simulate(problem: Problem, plan: Plan) -> Timeline:
    """Live bytes while each step of the plan runs, and the time of all steps together.

    With regions these are the steps of `unrolled_plan`. Of a plan that offloads the time is that
    of the longest path: operations run one after the other, each copy engine takes one copy after
    the other, and one waits for another only where it needs what that one makes.

    Args:
        problem: the step.
        plan: steps over the problem's operations in which every read finds an instance.

    Raises:
        KeyError: if a step names an unknown operation or reads a value not yet made.
        ValueError: if a step is not of the kind that it says, or if the plan offloads and the
            problem has no link.
        ProblemError: if the steps of a region do not stand together.
    """
    indexed = index(unrolled(problem))
    whole = unrolled_plan(problem, plan)
    if whole.offloaded:
        return measure_copies(indexed, numbers_with_copies(indexed, whole))
    return measure(indexed, indexed.numbers(whole))


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


def measure_copies(indexed: Indexed, steps: list[int]) -> Timeline:
    """`measure` for a schedule with copies.

    Args:
        indexed: the problem without copies; it has a link.
        steps: operation numbers of the problem with copies (`model.copies`).
    """
    both = indexed.derived(with_copies)
    on_host = len(indexed.nbytes)
    spans = spans_of(both, steps)
    arrives = _arrivals(indexed, both, steps)
    device = [span for span in spans if span[0] < on_host]
    host = [(v, born, arrives.get(last, last)) for v, born, last in spans if v >= on_host]
    live = _bytes_of(both, steps, device, indexed.problem.resident_nbytes)
    for step, (value, _, _) in taken_over(both, steps, device).items():
        live[step] -= both.nbytes[value]
    workspace = both.workspace_nbytes
    live = [nbytes + workspace[op] for nbytes, op in zip(live, steps, strict=True)]
    stall_us = math.fsum(stalls_of(indexed, steps))
    time_us = math.fsum(both.time_us[op] for op in steps) + stall_us
    return Timeline(tuple(live), time_us, stall_us, tuple(_bytes_of(both, steps, host, 0)))


def _bytes_of(indexed: Indexed, steps: list[int], spans: list[Span], other: int) -> list[int]:
    change = [0] * (len(steps) + 1)
    for value, born, last in spans:
        change[born] += indexed.nbytes[value]
        change[last + 1] -= indexed.nbytes[value]
    return list(accumulate(change[:-1], initial=other))[1:]


def _arrivals(indexed: Indexed, both: Indexed, steps: list[int]) -> dict[int, int]:
    """By the step of a reload, the first step that computing cannot pass before it has arrived."""
    found: dict[int, int] = {}
    next_wait: dict[int, int] = {}
    for step in range(len(steps) - 1, -1, -1):
        kind, value = copy_of(indexed, steps[step]) or (None, -1)
        if kind is StepKind.RELOAD and value in next_wait:
            found[step] = next_wait[value]
        for made in both.outputs[steps[step]]:
            next_wait.pop(made, None)
        if kind is not StepKind.OFFLOAD:  # the copy engine waits, computing does not
            next_wait.update(dict.fromkeys(both.inputs[steps[step]], step))
    return found


def stalls_of(indexed: Indexed, steps: list[int]) -> list[float]:
    """Per step of a schedule with copies, how long computing waits at it for a copy.

    Args:
        indexed: the problem without copies.
        steps: operation numbers of the problem with copies.

    Raises:
        ValueError: if the problem has no link.
    """
    return _timed(indexed, steps)[0]


def copy_times(problem: Problem, plan: Plan) -> list[tuple[int, float, float]]:
    """Of each step that begins a copy, its index, and when the copy begins and has arrived, in us.

    Raises:
        ValueError: if the plan has such a step and the problem no link.
    """
    indexed = index(problem)
    if not plan.offloaded:
        return []
    return _timed(indexed, numbers_with_copies(indexed, plan))[1]


def step_times(problem: Problem, plan: Plan) -> list[tuple[float, float]]:
    """Of each step, how long computing waits at it for a copy, and how long it then takes, in us.

    Together they are the time that `simulate` states.

    Raises:
        ValueError: if the plan offloads and the problem has no link.
    """
    indexed = index(problem)
    if not plan.offloaded:
        return [(0.0, indexed.time_us[op]) for op in indexed.numbers(plan)]
    steps = numbers_with_copies(indexed, plan)
    takes_us = [computing_us(indexed, op) for op in steps]
    return list(zip(stalls_of(indexed, steps), takes_us, strict=True))


def _timed(
    indexed: Indexed, steps: list[int]
) -> tuple[list[float], list[tuple[int, float, float]]]:
    """The stalls of a schedule with copies, and its copies."""
    link = indexed.problem.link
    if link is None:
        raise ValueError("The plan offloads, and the problem has no link: give it one.")
    now_us = out_free_us = in_free_us = 0.0
    arrives_us: dict[int, float] = {}  # what the latest instance of a value waits for
    sent_us: dict[int, float] = {}
    stalls, copies = [], []
    for step, op in enumerate(steps):
        waits_us = now_us
        copy = copy_of(indexed, op)
        if copy is None:
            reads = (arrives_us[v] for v in indexed.inputs[op] if v in arrives_us)
            waits_us = max(now_us, *reads, 0.0)
            for value in indexed.outputs[op]:
                arrives_us.pop(value, None)
        elif copy[0] is StepKind.OFFLOAD:
            begins_us = max(now_us, out_free_us, arrives_us.get(copy[1], 0.0))
            out_free_us = begins_us + link.out_us(indexed.nbytes[copy[1]])
            sent_us[copy[1]] = out_free_us
            copies.append((step, begins_us, out_free_us))
        elif copy[0] is StepKind.RELEASE:
            waits_us = max(now_us, sent_us[copy[1]])
        else:
            begins_us = max(now_us, in_free_us, sent_us[copy[1]])
            in_free_us = begins_us + link.in_us(indexed.nbytes[copy[1]])
            arrives_us[copy[1]] = in_free_us
            copies.append((step, begins_us, in_free_us))
        stalls.append(waits_us - now_us)
        now_us = waits_us + computing_us(indexed, op)
    return stalls, copies


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
                values = indexed.problem.values
                raise KeyError(
                    values[value % len(values)].name
                )  # on the host it is called the same
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


def _on_device(problem: Problem, plan: Plan) -> tuple[Indexed, list[int], list[Span]]:
    """The problem with copies, the plan's steps in it, and the instances on the device."""
    indexed = index(problem)
    steps = numbers_with_copies(indexed, plan)
    both = indexed.derived(with_copies) if plan.offloaded else indexed
    return both, steps, [s for s in spans_of(both, steps) if s[0] < len(problem.values)]


def instance_spans(problem: Problem, plan: Plan) -> list[tuple[str, int, int]]:
    """Every instance of a value as (value, step that makes it, last step at which it is live)."""
    _, _, spans = _on_device(problem, plan)
    return [(problem.values[value].name, born, last) for value, born, last in spans]


def occupied_spans(problem: Problem, plan: Plan) -> list[tuple[str, int, int]]:
    """The same, but for what is written over: from that step on its memory is the result's.

    So bytes of these spans and workspaces of operations add up to what is live at each step.
    """
    indexed, steps, spans = _on_device(problem, plan)
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
    """Index of the first step that runs a backward operation; how many there are if none does."""
    runs = [index for index, step in enumerate(plan.steps) if step.is_run]
    first = problem.first_backward(plan.schedule)
    return runs[first] if first < len(runs) else len(plan.steps)


def saved_values(
    problem: Problem, plan: Plan, spans: list[tuple[str, int, int]] | None = None
) -> frozenset[str]:
    """Values whose forward instance is on the device as the backward begins, which reads it.

    Args:
        problem: the step.
        plan: a plan of it.
        spans: `instance_spans` of the two, if the caller has them already.
    """
    start = backward_start(problem, plan)
    spans = instance_spans(problem, plan) if spans is None else spans
    pinned = frozenset(problem.outputs)
    crossing = {name for name, born, last in spans if born < start <= last}
    late = (step.target for step in plan.steps[start:] if step.is_run)
    read = {name for op in late for name in problem.op_by_name[op].inputs}
    return frozenset(name for name in crossing if name not in pinned or name in read)
