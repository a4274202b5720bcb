"""The naive validator of plans that offload; like `check`, it shares no code with the solver.

Enters: an unrolled problem and a plan whose operations run in an allowed order. Leaves: the list of
violations. It follows every instance as an object through the two memories, counts its bytes where
it is, and times each step as a task that begins when the last of those before it has ended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autoremat_solver.plan import Plan, Step, StepKind
from autoremat_solver.problem import Op, Phase, Problem, Value
from autoremat_solver.simulate import simulate


@dataclass(eq=False)
class Instance:
    """A value in one memory, as one step made it.

    Attributes:
        value: what it is an instance of.
        is_late: whether the backward made what it holds.
        born: the step that makes it.
        last: the last step that needs it.
        copy: the copy that makes it; None if an operation does.
        origin: the instance in the other memory that it is a copy of.
        is_left: of the device: it was copied away and is not to be read again.
        is_waited_for: whether computing has waited for the copy.
    """

    value: Value
    is_late: bool
    born: int
    last: int
    copy: Task | None = None
    origin: Instance | None = None
    is_left: bool = False
    is_waited_for: bool = False


@dataclass(eq=False)
class Task:
    """What takes time: it begins once all others of `after` have ended."""

    time_us: float
    after: list[Task] = field(default_factory=list)
    end_us: float = math.nan


def copy_violations(
    problem: Problem, plan: Plan, budget_nbytes: int | None, host_budget_nbytes: int | None
) -> list[str]:
    """What is wrong with the plan's copies, reads, bytes and time; empty if nothing is."""
    if problem.link is None:
        return ["The plan offloads, but the problem has no link to a host."]
    walk = _Walk(problem, plan)
    for number, step in enumerate(plan.steps):
        walk.take(number, step)
        if walk.found:
            return walk.found
    return walk.unfinished() or _figure_violations(
        problem, plan, walk, {"device": budget_nbytes, "host": host_budget_nbytes}
    )


class _Walk:
    """The plan, step by step."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        assert problem.link is not None
        self._problem, self._link = problem, problem.link
        self.is_host_pinned = problem.link.is_pinned
        self._pinned = frozenset(problem.outputs)
        self._end = len(plan.steps) - 1
        late = {op.name for op in problem.ops if op.phase is Phase.BACKWARD}
        runs = (n for n, step in enumerate(plan.steps) if step.is_run and step.target in late)
        self._start = next(runs, len(plan.steps))
        self.found: list[str] = []
        self.device: list[Instance] = []
        self.host: list[Instance] = []
        self.tasks: list[Task] = []
        self._now: dict[str, Instance] = {}
        self._computing: list[Task] = []
        self._engine: dict[StepKind, list[Task]] = {StepKind.OFFLOAD: [], StepKind.RELOAD: []}
        self._sent: dict[str, Instance] = {}

    def take(self, number: int, step: Step) -> None:
        """One step."""
        if step.is_run:
            self._run(number, self._problem.op_by_name[step.target])
        elif step.target not in self._problem.value_by_name:
            self.found.append(f"Step {number}: the {step.kind} of an unknown value.")
        elif step.target not in self._now or step.target in self._pinned:
            why = "an output stays" if step.target in self._pinned else "it was not made yet"
            self.found.append(f"Step {number} is a {step.kind} of {step.target!r}: {why}.")
        else:
            taken = {
                StepKind.OFFLOAD: self._offload,
                StepKind.RELEASE: self._release,
                StepKind.RELOAD: self._reload,
            }
            taken[step.kind](number, self._now[step.target])

    def unfinished(self) -> list[str]:
        """Copies that nobody waits for, and those that nobody reads."""
        came_back = {i.origin for i in self.device}
        found = [
            f"Nobody waits for the copy of {i.value.name!r} that step {i.born} begins."
            for i in self.host + self.device
            if i.copy is not None and not i.is_waited_for
        ]
        return found + [
            f"Value {i.value.name!r} leaves at step {i.born} and never comes back."
            for i in self.host
            if i not in came_back
        ]

    def _task(self, time_us: float, *after: Task | None) -> Task:
        task = Task(time_us, [other for other in after if other is not None])
        self.tasks.append(task)
        return task

    def _compute(self, time_us: float, *after: Task | None) -> None:
        self._computing.append(self._task(time_us, *self._computing[-1:], *after))

    def _copy(self, kind: StepKind, time_us: float, *after: Task | None) -> Task:
        engine = self._engine[kind]
        engine.append(self._task(time_us, *engine[-1:], *self._computing[-1:], *after))
        return engine[-1]

    def _run(self, number: int, op: Op) -> None:
        waits = []
        for name in dict.fromkeys(op.inputs):
            if name not in self._now:
                self.found.append(f"Step {number} ({op.name!r}) reads {name!r}, not made yet.")
                continue
            self._judge_read(number, op, self._now[name])
            waits.append(self._wait(number, self._now[name]))
        for name in op.outputs:
            self._make(number, op, self._problem.value_by_name[name])
        self._compute(op.time_us, *waits)

    def _wait(self, number: int, instance: Instance) -> Task | None:
        """The copy to wait for; where it came from, it is needed until now."""
        instance.last = max(instance.last, number)
        if instance.origin is not None and not instance.is_waited_for:
            instance.origin.last = max(instance.origin.last, number)
        instance.is_waited_for = True
        return instance.copy

    def _make(self, number: int, op: Op, value: Value) -> None:
        before, on_host = self._now.get(value.name), self._sent.get(value.name)
        if on_host is not None and not on_host.is_waited_for:
            self.found.append(
                f"Step {number} ({op.name!r}) makes {value.name!r} while it is being copied."
            )
        new = Instance(value, number >= self._start, number, number)
        self.device.append(new)
        if before is not None and value.name in self._pinned:
            return
        self._now[value.name] = new
        if value.name in self._pinned:
            new.last = self._end

    def _judge_read(self, number: int, op: Op, instance: Instance) -> None:
        value, step = instance.value, f"Step {number} ({op.name!r})"
        if instance.is_left:
            self.found.append(f"{step} reads {value.name!r}, which has left and is not back.")
        made_in = self._problem.producer_of[value.name].phase
        if made_in is Phase.BACKWARD or number < self._start:
            return
        if value.must_save and instance.is_late:
            self.found.append(f"{step} reads a recomputed {value.name!r} (must_save).")
        if value.must_recompute and not instance.is_late:
            self.found.append(f"{step} reads the forward's {value.name!r} (must_recompute).")

    def _offload(self, number: int, instance: Instance) -> None:
        value, before = instance.value, self._sent.get(instance.value.name)
        if instance.is_left or (before is not None and not before.is_waited_for):
            self.found.append(f"Step {number} sends {value.name!r} away a second time.")
        instance.last = max(instance.last, number)
        takes_us = self._link.out_us(value.nbytes)
        copy = self._copy(StepKind.OFFLOAD, takes_us, instance.copy)
        self._compute(self._link.ask_us + takes_us * self._link.slowdown)
        self._sent[value.name] = Instance(value, instance.is_late, number, number, copy, instance)
        self.host.append(self._sent[value.name])

    def _release(self, number: int, instance: Instance) -> None:
        on_host = self._sent.get(instance.value.name)
        if on_host is None or on_host.is_waited_for:
            self.found.append(
                f"Step {number} waits for a copy of {instance.value.name!r}: none is on its way."
            )
            return
        on_host.last = number
        on_host.is_waited_for = instance.is_left = True
        self._compute(0.0, on_host.copy, self._wait(number, instance))

    def _reload(self, number: int, instance: Instance) -> None:
        value, on_host = instance.value, self._sent.get(instance.value.name)
        if on_host is None or not on_host.is_waited_for:
            self.found.append(f"Step {number} reloads {value.name!r}, which is not on the host.")
            return
        on_host.last = number
        takes_us = self._link.in_us(value.nbytes)
        copy = self._copy(StepKind.RELOAD, takes_us, on_host.copy)
        self._compute(self._link.ask_us + takes_us * self._link.slowdown)
        new = Instance(value, on_host.is_late, number, number, copy, on_host)
        self.device.append(new)
        self._now[value.name] = new


def _figure_violations(
    problem: Problem, plan: Plan, walk: _Walk, budgets: dict[str, int | None]
) -> list[str]:
    """Where bytes or time are not those of `simulate`, or bytes are above a budget."""
    simulated = simulate(problem, plan)
    live = _live_nbytes(problem, plan, walk.device)
    host = _bytes_at(walk.host, len(plan.steps), in_powers=walk.is_host_pinned)
    found = []
    for memory, ours, theirs in (
        ("device", live, simulated.live_nbytes),
        ("host", host, simulated.host_nbytes),
    ):
        differ = [n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        found += [
            f"Step {n}: {ours[n]:,} bytes on the {memory}, but simulate says {theirs[n]:,}."
            for n in differ[:1]
        ]
        budget_nbytes, peak_nbytes = budgets[memory], max(ours, default=0)
        if budget_nbytes is not None and peak_nbytes > budget_nbytes:
            found.append(
                f"Step {ours.index(peak_nbytes)} has {peak_nbytes:,} bytes on the {memory}, "
                f"{peak_nbytes - budget_nbytes:,} above the budget of {budget_nbytes:,}."
            )
    time_us = _longest_us(walk.tasks)
    if not math.isclose(time_us, simulated.time_us, rel_tol=1e-9, abs_tol=1e-9):
        found.append(f"The plan takes {time_us} us, but simulate says {simulated.time_us} us.")
    return found


def _live_nbytes(problem: Problem, plan: Plan, instances: list[Instance]) -> list[int]:
    """Bytes on the device; what an operation writes over goes as it begins."""
    result = [nbytes + problem.resident_nbytes for nbytes in _bytes_at(instances, len(plan.steps))]
    ended: dict[int, list[Value]] = {}
    for instance in instances:
        if instance.born < instance.last and instance.value.name not in problem.outputs:
            ended.setdefault(instance.last, []).append(instance.value)
    for number, step in enumerate(plan.steps):
        if step.is_run:
            op = problem.op_by_name[step.target]
            room = sum(problem.value_by_name[name].nbytes for name in op.outputs)
            over = (v.nbytes for v in ended.get(number, ()) if v.name in op.overwrites)
            taken_nbytes = max((nbytes for nbytes in over if nbytes <= room), default=0)
            result[number] += op.workspace_nbytes - taken_nbytes
    return result


def _bytes_at(instances: list[Instance], steps: int, *, in_powers: bool = False) -> list[int]:
    """Bytes of instances at each step; of each the next power of two, if only those are given."""
    result = [0] * steps
    for instance in instances:
        taken = nbytes = instance.value.nbytes
        if in_powers and nbytes:
            taken = 1
            while taken < nbytes:
                taken *= 2
        for step in range(instance.born, instance.last + 1):
            result[step] += taken
    return result


def _longest_us(tasks: list[Task]) -> float:
    """When the last task ends; each stands after those that it waits for."""
    for task in tasks:
        task.end_us = task.time_us + max((other.end_us for other in task.after), default=0.0)
    return max((task.end_us for task in tasks), default=0.0)
