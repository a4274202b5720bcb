"""A naive validator that shares no code with the solver.

Enters: a problem and a plan. Leaves: the list of violations, each naming its culprit; an empty
list is a valid plan. It walks the steps once, counts for each instance the readers to come and
frees it after the last one, so that it can disagree with `simulate`. Linear in the reads.
Plans that offload are walked by `check_copies`, as naively.
"""

from __future__ import annotations

from autoremat_solver.check_copies import copy_violations
from autoremat_solver.plan import Plan, StepKind
from autoremat_solver.problem import Op, Phase, Problem, ProblemError
from autoremat_solver.regions import unrolled, unrolled_plan
from autoremat_solver.simulate import simulate


def check(
    problem: Problem,
    plan: Plan,
    budget_nbytes: int | None = None,
    host_budget_nbytes: int | None = None,
) -> list[str]:
    """What is wrong with the plan; empty if nothing is.

    With regions the plan of the whole step is judged.

    Args:
        problem: the step.
        plan: the plan to judge.
        budget_nbytes: the peak it must not exceed; None for any peak.
        host_budget_nbytes: the same for what the host holds of a plan that offloads.
    """
    unknown = [op for op in plan.schedule if op not in problem.op_by_name]
    if unknown:
        return [f"Unknown operation {name!r} in the schedule." for name in unknown]
    try:
        problem, plan = unrolled(problem), unrolled_plan(problem, plan)
    except ProblemError as error:
        return [str(error)]
    ops = [problem.op_by_name[name] for name in plan.schedule]
    violations = _kind_violations(plan) + _order_violations(problem, ops)
    if len(ops) < len(plan.steps):
        return violations or copy_violations(problem, plan, budget_nbytes, host_budget_nbytes)
    violations += _read_violations(problem, ops)
    if violations:
        return violations
    return _peak_violations(problem, plan, ops, budget_nbytes)


def _kind_violations(plan: Plan) -> list[str]:
    found = []
    ran: set[str] = set()
    for number, step in enumerate(plan.steps):
        if not step.is_run:
            continue
        is_first = step.target not in ran
        if is_first != (step.kind is StepKind.FIRST_RUN):
            before = "did not run" if is_first else "ran"
            found.append(f"Step {number} is a {step.kind}, but {step.target!r} {before} before.")
        ran.add(step.target)
    return found


def _first_backward(ops: list[Op]) -> int:
    return next((i for i, op in enumerate(ops) if op.phase is Phase.BACKWARD), len(ops))


def _order_violations(problem: Problem, ops: list[Op]) -> list[str]:
    start = _first_backward(ops)
    found = []
    ran_once = {op.name for op in ops}
    found += [
        f"The operation {op.name!r} never runs."
        for op in problem.ops
        if op.phase is Phase.ANY and op.name not in ran_once
    ]
    wanted = [op.name for op in problem.ops if op.phase is Phase.FORWARD]
    ran = [op.name for op in ops[:start] if op.phase is Phase.FORWARD]
    if ran != wanted:
        found += _differences("forward", "before the first backward operation", wanted, ran)
    wanted = [op.name for op in problem.ops if op.phase is Phase.BACKWARD]
    ran = [op.name for op in ops if op.phase is Phase.BACKWARD]
    if ran != wanted:
        found += _differences("backward", "in the schedule", wanted, ran)
    runs: dict[str, int] = {}
    for op in ops:
        runs[op.name] = runs.get(op.name, 0) + 1
    for op in problem.ops:
        if not op.recomputable and runs.get(op.name, 0) > 1:
            found.append(f"Operation {op.name!r} is not recomputable and runs {runs[op.name]}x.")
    made = {name for op in ops for name in op.outputs}
    found += [f"Output {name!r} is never made." for name in problem.outputs if name not in made]
    return found


def _differences(kind: str, where: str, wanted: list[str], ran: list[str]) -> list[str]:
    found = []
    for name in dict.fromkeys(wanted):
        times = ran.count(name)
        if times != 1:
            found.append(f"The {kind} operation {name!r} runs {times}x {where}, not once.")
    if not found:
        first = next(i for i, (a, b) in enumerate(zip(wanted, ran, strict=True)) if a != b)
        found.append(f"The {kind} operation {ran[first]!r} runs where {wanted[first]!r} must.")
    return found


def _read_violations(problem: Problem, ops: list[Op]) -> list[str]:
    start = _first_backward(ops)
    pinned = set(problem.outputs)
    made_at: dict[str, int] = {}
    found = []
    for step, op in enumerate(ops):
        for name in op.inputs:
            value = problem.value_by_name[name]
            if name not in made_at:
                found.append(f"Step {step} ({op.name!r}) reads {name!r}, which was not made yet.")
                continue
            if problem.producer_of[name].phase is Phase.BACKWARD or step < start:
                continue
            from_forward = made_at[name] < start
            if value.must_save and not from_forward:
                found.append(f"Step {step} ({op.name!r}) reads a recomputed {name!r} (must_save).")
            if value.must_recompute and from_forward:
                found.append(
                    f"Step {step} ({op.name!r}) reads the forward's {name!r} (must_recompute)."
                )
        for name in op.outputs:
            if name not in pinned or name not in made_at:
                made_at[name] = step
    return found


def _live_nbytes(problem: Problem, ops: list[Op]) -> list[int]:
    """Live bytes at every step: plus what it makes, less what nobody reads after it.

    What an operation writes over goes as it begins, if this plan needs it no more.
    """
    pinned = set(problem.outputs)
    instance: dict[str, int] = {}
    reads: list[list[int]] = []
    readers_left: list[int] = []
    size: list[int] = []
    name_of: list[str] = []
    made: list[list[int]] = []
    for op in ops:
        reads.append([instance[name] for name in set(op.inputs)])
        for number in reads[-1]:
            readers_left[number] += 1
        made.append([])
        for name in op.outputs:
            again = name in pinned and name in instance
            number = len(size)
            size.append(problem.value_by_name[name].nbytes)
            name_of.append(name)
            readers_left.append(1 if name in pinned and not again else 0)
            made[-1].append(number)
            if not again:
                instance[name] = number
    total = problem.resident_nbytes
    result = []
    for op, read, new in zip(ops, reads, made, strict=True):
        total += sum(size[number] for number in new)
        for number in read:
            readers_left[number] -= 1
        ended = [size[n] for n in read if name_of[n] in op.overwrites and readers_left[n] == 0]
        room_nbytes = sum(size[number] for number in new)
        taken_nbytes = max((nbytes for nbytes in ended if nbytes <= room_nbytes), default=0)
        result.append(total + op.workspace_nbytes - taken_nbytes)
        total -= sum(size[n] for n in {*read, *new} if readers_left[n] == 0)
    return result


def _peak_violations(
    problem: Problem, plan: Plan, ops: list[Op], budget_nbytes: int | None
) -> list[str]:
    live = _live_nbytes(problem, ops)
    simulated = simulate(problem, plan).live_nbytes
    found = [
        f"Step {step} ({op.name!r}) has {a:,} bytes live, but simulate says {b:,}."
        for step, (op, a, b) in enumerate(zip(ops, live, simulated, strict=True))
        if a != b
    ][:1]
    peak = max(live, default=0)
    if live and budget_nbytes is not None and peak > budget_nbytes:
        step = live.index(peak)
        found.append(
            f"Step {step} ({ops[step].name!r}) has {peak:,} bytes live, "
            f"{peak - budget_nbytes:,} above the budget of {budget_nbytes:,}."
        )
    return found
