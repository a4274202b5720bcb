"""What a GPU's allocator reserves for a planned step.

Enters: the graphs of a step with their plans, each tensor around them, and the device's memory.
Leaves: a `ReservedMemory` for the report. What a graph asks of the allocator is read from its
generated code where that was read; else it follows the plan, one operation after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoremat_solver import Phase, Plan, Problem
from autoremat_solver.simulate import backward_start, occupied_spans

from autoremat.memory.held_tensors import HeldTensors
from autoremat.planning.choice import Choice, as_chosen
from autoremat.planning.part import Part
from autoremat.problem.lower import without_spare_states
from autoremat.problem.shell import LATER_GRADIENTS, OPTIMIZER_STEP
from autoremat.problem.subject import Subject
from autoremat.reporting.reserved import ReservedCase, ReservedMemory
from autoremat.reserved.replay import DEFAULT, Replayed, compare
from autoremat.reserved.step import STEPS, Event, GraphEvents, StepMemory

LARGEST = 3  # blocks that are told of


def reserved_memory(
    parts: Sequence[Part], tensors: HeldTensors, device_nbytes: int
) -> ReservedMemory:
    """What several steps reserve.

    Args:
        parts: the graphs, in the order of their forwards.
        tensors: what lives around them.
        device_nbytes: all that the device has.
    """
    found = compare(step_memory(parts, tensors), device_nbytes)
    default = found[DEFAULT]
    return ReservedMemory(
        cases=tuple(_case(setting, one, device_nbytes) for setting, one in found.items()),
        at_peak_nbytes=default.at_peak.allocated_nbytes,
        free_nbytes=default.at_peak.free_nbytes[:LARGEST],
        steps=STEPS,
        device_nbytes=device_nbytes,
    )


def step_memory(parts: Sequence[Part], tensors: HeldTensors) -> StepMemory:
    """All that a step allocates."""
    return StepMemory(
        before=tensors.before,
        batch=tensors.batch,
        gradients=tensors.gradients,
        libraries=tensors.libraries,
        graphs=tuple(asked_of(part.subject, part.choice) for part in parts),
        update=tensors.update,
    )


def asked_of(subject: Subject, choice: Choice) -> GraphEvents:
    """What a graph asks of the allocator under its plan."""
    if choice.asked is not None:
        return choice.asked
    subject, plan = as_chosen(subject, choice), choice.solution.plan
    return asked_by_plan(without_spare_states(subject.lowered.problem, plan), plan)


def asked_by_plan(problem: Problem, plan: Plan) -> GraphEvents:
    """The same where operations run one by one, each with buffers of its own.

    What other graphs and the optimizer take is left to them.
    """
    spans = [span for span in occupied_spans(problem, plan) if span[0] != LATER_GRADIENTS]
    born: dict[int, list[int]] = {}
    last: dict[int, list[int]] = {}
    end = len(plan.steps) - 1
    for number, (_, first, final) in enumerate(spans):
        born.setdefault(first, []).append(number)
        if final < end or spans[number][0] not in problem.outputs:
            last.setdefault(final, []).append(number)
    events: list[list[Event]] = [[], []]
    start = backward_start(problem, plan)
    for number, step in enumerate(plan.steps):
        name = step.target if step.is_run else ""
        into = events[number >= start]
        into += _step(problem, name, number, spans, (born.get(number, []), last.get(number, [])))
    backward = {
        number
        for number, (name, *_) in enumerate(spans)
        if name in problem.outputs and problem.producer_of[name].phase is Phase.BACKWARD
    }
    return GraphEvents(tuple(events[0]), tuple(events[1]), frozenset(backward))


def _step(
    problem: Problem,
    name: str,
    step: int,
    spans: Sequence[tuple[str, int, int]],
    numbers: tuple[Sequence[int], Sequence[int]],
) -> list[Event]:
    sizes = {n: problem.value_by_name[spans[n][0]].nbytes for found in numbers for n in found}
    born, last = ([n for n in found if sizes[n]] for found in numbers)
    found = [Event(number, sizes[number]) for number in born]
    workspace_nbytes = problem.op_by_name[name].workspace_nbytes if name else 0  # none of a copy
    if workspace_nbytes and name != OPTIMIZER_STEP:
        found += [Event(("workspace", step), n) for n in (workspace_nbytes, 0)]
    return found + [Event(number, 0) for number in last]


def _case(setting: str, found: Replayed, device_nbytes: int) -> ReservedCase:
    return ReservedCase(
        setting=setting,
        peak_nbytes=found.peak_reserved_nbytes,
        allocated_nbytes=found.peak_allocated_nbytes,
        segments=found.at_peak.segments,
        fits=not found.is_out and found.peak_reserved_nbytes <= device_nbytes,
    )
