"""Why the chosen modules look as they do: one graph's part of the report.

Enters: a `Choice` and the graph that it was made for. Leaves: a `GraphReport`. What is saved and
what is recomputed is read off the two modules, not off the plan: the report says what runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoremat_solver import Phase, Problem
from autoremat_solver.bounds.certified import Bounds
from autoremat_solver.certificate import holds
from autoremat_solver.model.indexed import index
from autoremat_solver.offload.bounds import least_peak_nbytes
from autoremat_solver.plan import StepKind
from autoremat_solver.simulate import backward_start, instance_spans
from torch import fx

from autoremat import _torch
from autoremat.cost.calls import OpCost
from autoremat.emit.rewrite import original_name
from autoremat.errors import LiveValue
from autoremat.explain.advice import Narrowed, advice_of
from autoremat.explain.places import op_name, source_of
from autoremat.explain.waiting import waiting_of, why_it_stays
from autoremat.graph.modules import module_path
from autoremat.memory.residents import Resident
from autoremat.planning.choice import Choice, as_chosen
from autoremat.planning.formula import formula_or_none
from autoremat.planning.simulated import without_plan
from autoremat.planning.torch_plan import handed_over
from autoremat.problem.lower import RNG_STATE, without_spare_states, without_states
from autoremat.problem.shell import LATER_GRADIENTS, LOSS_BOUNDARY
from autoremat.problem.subject import Subject
from autoremat.reporting import GraphReport, PeakFormula, ValueAction, ValueReport
from autoremat.reporting.alternatives import Alternatives, Rerun
from autoremat.reporting.timeline import Place, timeline_of
from autoremat.units import format_nbytes, format_us

_MOST_NAMED = 5  # of the values that are live at a peak


def explain(
    name: str,
    subject: Subject,
    plain: Subject,
    choice: Choice,
    formula: PeakFormula | None = None,
    resident: Resident | None = None,
    narrowed: Narrowed | None = None,
) -> GraphReport:
    """One graph's report.

    Args:
        name: of the graph.
        subject: the graph.
        plain: the same in a step in which no graph has a plan.
        choice: its plan.
        formula: of the plan's peak, if sizes vary.
        resident: what the step holds whatever the plan; None where no advice is wanted.
        narrowed: states the graph under autocast, where it can be traced again.
    """
    costs = subject.costs
    subject, solution = as_chosen(subject, choice), choice.solution
    problem = without_spare_states(subject.lowered.problem, solution.plan)
    plain = as_chosen(plain, choice)
    once = without_plan(plain)
    timeline = timeline_of(
        problem,
        solution.plan,
        lambda name: _place_of(name, subject),
        (without_spare_states(plain.lowered.problem, once), once),
    )
    baseline = choice.baseline()
    step = timeline.steps[timeline.peak_step].name
    node = subject.lowered.node_of.get(step)
    return GraphReport(
        name=name,
        predicted_peak_nbytes=choice.peak_nbytes,
        baseline_peak_nbytes=baseline.peak_nbytes,
        predicted_time_us=solution.timeline.time_us,
        baseline_time_us=baseline.time_us,
        bound_us=solution.bound_us,
        status=solution.status,
        method=choice.method,
        solve_seconds=solution.seconds,
        values=tuple(_values(subject, choice)),
        timeline=timeline,
        peak_step=step,
        peak_source=source_of(node) if node is not None else "",
        estimated_ops=tuple(
            sorted({_guess(op_name(n), cost) for n, cost in costs.items() if _guessed(cost)})
        ),
        constraints=tuple(
            sorted({f"{op_name(n)} {why}" for n, why in subject.constraints.run_once.items()})
        ),
        left_out=solution.left_out,
        code_time_us=choice.code_us,
        baseline_code_time_us=baseline.code_us,
        advice=(
            () if resident is None else advice_of(subject, choice, resident, formula, narrowed)
        ),
        peak_formula=formula,
        waiting=waiting_of(subject, choice),
    )


def _place_of(name: str, subject: Subject) -> Place:
    node = subject.lowered.node_of.get(name)
    if node is None:
        return Place(name.replace("_", " "))
    cost = subject.costs.get(node)
    is_estimated = cost is not None and _guessed(cost)
    return Place(op_name(node), module_path(node), source_of(node), is_estimated)


def _guessed(cost: OpCost) -> bool:
    return (not cost.measured or cost.is_doubtful) and cost.time_us > 0


def _guess(name: str, cost: OpCost) -> str:
    return f"{name} (its measured times contradict each other)" if cost.is_doubtful else name


def _values(subject: Subject, choice: Choice) -> list[ValueReport]:
    saved = handed_over(subject.joint, subject.lowered.storages, choice.backward)
    forward, copies = _runs(choice.forward), _runs(choice.backward)
    storages, away = subject.lowered.storages, _crossing(subject.lowered.problem, choice)
    alternatives = Alternatives(subject.lowered.problem, choice.solution.plan)
    found = []
    for node in subject.joint.nodes:
        if node.op != "call_function" or node in subject.joint.backward:
            continue
        for name in storages.made_by[node]:
            root = storages.root.get(name)
            if root is None or storages.nbytes[name] == 0:
                continue
            count = max(copies[node.name], copies[root.name])
            is_late = count > 0 and not (forward[node.name] or forward[root.name])
            count -= is_late  # its first run is none again
            action = ValueAction.RECOMPUTE if count else ValueAction.FREE
            if name in away:
                action = ValueAction.AWAY
            elif name in saved:
                action = ValueAction.SAVE
            value = _bare(node, root, storages.nbytes[name], action, subject.costs)
            if name not in subject.lowered.problem.value_by_name and name not in saved:
                value = _inlined(value)
            elif action is ValueAction.RECOMPUTE:
                largest = max(storages.made_by[node], key=storages.nbytes.__getitem__)
                value = _with_recomputes(value, count, beside="" if name == largest else largest)
            elif action is ValueAction.SAVE:
                value = _with_alternative(value, alternatives.of(name), name, subject)
                value = replace(value, recomputes=count)  # read, freed, and made for later reads
            elif action is ValueAction.AWAY:
                value = _away(value, count)
            else:
                unread = "the backward does not read it"
                value = replace(value, reason="only the backward makes it" if is_late else unread)
            found.append(value)
    return found


def _crossing(problem: Problem, choice: Choice) -> frozenset[str]:
    """Values that leave in the forward, and are back in the backward."""
    steps = choice.solution.plan.steps
    start = backward_start(problem, choice.solution.plan)
    left = Counter(step.target for step in steps[:start] if step.kind is StepKind.OFFLOAD)
    back = Counter(step.target for step in steps[:start] if step.kind is StepKind.RELOAD)
    return frozenset(left - back)


def _runs(module: fx.GraphModule) -> Counter[str]:
    """How often a module runs each operation of the joint graph, by its name there."""
    calls = (node for node in module.graph.nodes if node.op == "call_function")
    return Counter(original_name(node.name) for node in calls)


def _bare(
    node: fx.Node,
    root: fx.Node,
    nbytes: int,
    action: ValueAction,
    costs: Mapping[fx.Node, OpCost],
) -> ValueReport:
    """A value without its reason."""
    tensor = _torch.fake_value(root)
    return ValueReport(
        name=root.name,
        nbytes=nbytes,
        shape=tuple(n if isinstance(n, int) else str(n) for n in tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        action=action,
        source=source_of(root),
        module=module_path(root),
        op=op_name(node),
        time_us=costs[node].time_us if node in costs else 0.0,
    )


def _inlined(value: ValueReport) -> ValueReport:
    """What the compiler computes inside the operations that read it, so that it is no buffer."""
    reason = "computed inside the operations that read it: takes no memory and no time of its own"
    return replace(value, action=ValueAction.FREE, time_us=0.0, reason=reason)


def _with_recomputes(value: ValueReport, count: int, *, beside: str) -> ValueReport:
    """What a recompute costs; one run may make several values, and the largest bears its time."""
    if beside:
        reason = f"recomputed with `{beside}`, in the same run"
        return replace(value, recomputes=count, time_us=0.0, reason=reason)
    times = f"{count}x, {format_us(value.time_us)} each," if count > 1 else "once"
    if count == 1 and value.time_us:
        times = f"once, {format_us(value.time_us)},"
    reason = f"recomputed {times} to free {format_nbytes(value.nbytes)}"
    return replace(value, recomputes=count, reason=reason)


def _away(value: ValueReport, count: int) -> ValueReport:
    """What waiting elsewhere frees; the backward may make later instances of it again."""
    again = f", and is recomputed {count}x for later reads" if count else ""
    reason = f"waits elsewhere, to free {format_nbytes(value.nbytes)}{again}"
    return replace(value, recomputes=count, reason=reason)


def _with_alternative(
    value: ValueReport, rerun: Rerun | None, storage: str, subject: Subject
) -> ValueReport:
    """What saving spares, or what forbids anything else."""
    size = format_nbytes(value.nbytes)
    if storage in subject.lowered.problem.outputs:
        return replace(value, reason="returned to the training loop, which holds it anyway")
    if storage in subject.constraints.must_save:
        reason = "saved by rule: a checkpoint policy, or layers that share it"
        return replace(value, reason=reason)
    if rerun is None:
        return replace(value, reason=f"saving {size} avoids making it again")
    if rerun.blocked_by:
        node = subject.lowered.node_of.get(rerun.blocked_by)
        why = subject.constraints.run_once.get(node, "runs once") if node is not None else ""
        what = "its operation" if len(rerun.ops) == 1 else f"`{rerun.blocked_by}` behind it"
        return replace(value, reason=f"saved, since {what} {why}".rstrip())
    runs, time = len(rerun.ops), format_us(rerun.time_us)
    what = f"one recompute of {time}" if runs == 1 else f"{runs} recomputes of {time} together"
    return replace(
        value,
        reason=f"saving {size} avoids {what}",
        avoided_runs=runs,
        avoided_us=rerun.time_us,
    )


def facts_of_refusal(
    subject: Subject,
    choice: Choice,
    budget_nbytes: int,
    resident: Resident,
    narrowed: Narrowed | None = None,
) -> dict[str, Any]:
    """What an error says of a graph whose smallest plan does not fit the budget."""
    formula = formula_or_none(subject, choice)
    subject, solution = as_chosen(subject, choice), choice.solution
    step = solution.plan.steps[solution.timeline.peak_step].target
    node = subject.lowered.node_of.get(step)
    return {
        "budget_nbytes": budget_nbytes,
        "smallest_peak_nbytes": choice.peak_nbytes,
        "floor_nbytes": _floor_nbytes(subject.lowered.problem, choice),
        "step": step,
        "source": source_of(node) if node is not None else "",
        "largest": _largest_live(subject, choice),
        "tried": solution.tried,
        "left_out": solution.left_out,
        "advice": advice_of(subject, choice, resident, formula, narrowed),
        "offload": why_it_stays(subject, choice),
    }


def _floor_nbytes(problem: Problem, choice: Choice) -> int:
    """What is proven of the step that runs, not of a model of it: no plan peaks below.

    Inductor fuses operations and reuses memory, so that what is proven of single operations does
    not hold for its code: there it is what is resident. Operation by operation the model is what
    runs, but for the states of generators, which only a plan that repeats draws holds.
    """
    if choice.is_read:
        return problem.resident_nbytes
    bare = without_states(problem)
    floor_nbytes = choice.solution.floor_nbytes
    if bare != problem:
        indexed, may_leave = index(bare), problem.link is not None
        floor_nbytes = least_peak_nbytes(indexed) if may_leave else Bounds(indexed).floor_nbytes
    holding = holds("floor in bytes", floor_nbytes, choice.peak_nbytes, strict=False)
    return floor_nbytes if holding else problem.resident_nbytes


def _largest_live(subject: Subject, choice: Choice) -> tuple[LiveValue, ...]:
    """What takes most at the plan's peak, the operation's own workspace among it, largest first."""
    plan, problem = choice.solution.plan, subject.lowered.problem
    step = choice.solution.timeline.peak_step
    spans = instance_spans(problem, plan)
    live = dict.fromkeys(name for name, born, last in spans if born <= step <= last)
    root, node_of = subject.lowered.storages.root, subject.lowered.node_of

    def live_value(name: str) -> LiveValue:
        source = source_of(root[name]) if name in root else ""
        return LiveValue(name, problem.value_by_name[name].nbytes, source, _kind(name, problem))

    found = [live_value(name) for name in live]
    if plan.steps[step].is_run:
        op = problem.op_by_name[plan.steps[step].target]
        source = source_of(node_of[op.name]) if op.name in node_of else ""
        found.append(LiveValue(op.name, op.workspace_nbytes, source, "its workspace"))
    largest = sorted(found, key=lambda value: value.nbytes, reverse=True)
    return tuple(value for value in largest[:_MOST_NAMED] if value.nbytes)


def _kind(name: str, problem: Problem) -> str:
    """What a value is to the step."""
    maker = problem.producer_of[name]
    if name.endswith(RNG_STATE):
        return "generator state"
    if maker.name == LOSS_BOUNDARY and name != LATER_GRADIENTS:
        return "incoming gradient"
    if maker.phase is Phase.BACKWARD:
        return "gradient" if name in problem.outputs else "made by the backward"
    return "output" if name in problem.outputs else "activation"
