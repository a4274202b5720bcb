"""Why the chosen modules look as they do: one graph's part of the report.

Enters: a `Choice` and the graph that it was made for. Leaves: a `GraphReport`. What is saved and
what is recomputed is read off the two modules, not off the plan: the report says what runs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import PurePath

import torch
from autoremat_solver import Plan, simulate
from autoremat_solver.simulate import instance_spans
from torch import fx

from autoremat import _torch
from autoremat.choose import Choice, Subject
from autoremat.cost import OpCost
from autoremat.errors import LiveValue
from autoremat.reporting import GraphReport, ValueAction, ValueReport, format_nbytes
from autoremat.reporting.text import format_us

_COPY_SUFFIX = re.compile(r"_recomputed(_\d+)?$")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH_CODE = f"{PurePath(torch.__file__).parent}"


def explain(
    name: str, subject: Subject, choice: Choice, costs: Mapping[fx.Node, OpCost]
) -> GraphReport:
    """One graph's report."""
    lowered, solution = subject.lowered, choice.solution
    baseline = simulate(lowered.problem, Plan(tuple(op.name for op in lowered.problem.ops)))
    step = solution.plan.schedule[solution.timeline.peak_step]
    node = lowered.node_of.get(step)
    return GraphReport(
        name=name,
        predicted_peak_nbytes=choice.peak_nbytes,
        baseline_peak_nbytes=max(baseline.peak_nbytes, choice.peak_nbytes),
        predicted_time_us=solution.timeline.time_us,
        baseline_time_us=baseline.time_us,
        bound_us=min(solution.bound_us, solution.timeline.time_us),
        status=solution.status,
        method=choice.method,
        solve_seconds=solution.seconds,
        values=tuple(_values(subject, choice, costs)),
        timeline_live_nbytes=solution.timeline.live_nbytes,
        peak_step=step,
        peak_source=source_of(node) if node is not None else "",
        estimated_ops=tuple(sorted({_op_name(n) for n, cost in costs.items() if _guessed(cost)})),
        constraints=tuple(
            sorted({f"{_op_name(n)} {why}" for n, why in subject.constraints.run_once.items()})
        ),
    )


def _guessed(cost: OpCost) -> bool:
    return not cost.measured and cost.time_us > 0


def _values(subject: Subject, choice: Choice, costs: Mapping[fx.Node, OpCost]) -> list[ValueReport]:
    saved = {node.name for node in choice.backward.graph.find_nodes(op="placeholder")}
    copies = Counter(
        _COPY_SUFFIX.sub("", node.name)
        for node in choice.backward.graph.nodes
        if node.op == "call_function"
    )
    storages = subject.lowered.storages
    found = []
    for node in subject.joint.nodes:
        if node.op != "call_function" or node in subject.joint.backward:
            continue
        for name in storages.made_by[node]:
            root = storages.root.get(name)
            if root is None or storages.nbytes[name] == 0:
                continue
            action = ValueAction.FREE
            if root.name in saved:
                action = ValueAction.SAVE
            elif copies[node.name] or copies[root.name]:
                action = ValueAction.RECOMPUTE
            repeats = max(copies[node.name], copies[root.name])
            found.append(_value(node, root, storages.nbytes[name], action, repeats, costs))
    return found


def _value(
    node: fx.Node,
    root: fx.Node,
    nbytes: int,
    action: ValueAction,
    repeats: int,
    costs: Mapping[fx.Node, OpCost],
) -> ValueReport:
    tensor = root.meta["val"]
    cost = costs.get(node)
    time_us = cost.time_us if cost is not None else 0.0
    return ValueReport(
        name=root.name,
        nbytes=nbytes,
        shape=tuple(n if isinstance(n, int) else str(n) for n in tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        action=action,
        recomputes=repeats if action is ValueAction.RECOMPUTE else 0,
        source=source_of(root),
        module=_module_of(root),
        op=_op_name(node),
        reason=_reason(nbytes, action, repeats, time_us),
        time_us=time_us,
    )


def _reason(nbytes: int, action: ValueAction, repeats: int, time_us: float) -> str:
    size = format_nbytes(nbytes)
    match action:
        case ValueAction.SAVE:
            return f"keeping {size} spares the backward {format_us(time_us)} and its inputs"
        case ValueAction.RECOMPUTE:
            times = "once" if repeats == 1 else f"{repeats} times"
            return f"making it again {times} ({format_us(time_us)} each) keeps {size} free"
        case ValueAction.FREE:
            return "the backward does not read it"


def largest_live(subject: Subject, choice: Choice, count: int = 5) -> tuple[LiveValue, ...]:
    """The largest values that live at the plan's peak, largest first."""
    plan, problem = choice.solution.plan, subject.lowered.problem
    step = choice.solution.timeline.peak_step
    live = {name for name, born, last in instance_spans(problem, plan) if born <= step <= last}
    ordered = sorted(live, key=lambda name: -problem.value_by_name[name].nbytes)[:count]
    outputs = set(problem.outputs)
    root = subject.lowered.storages.root
    return tuple(
        LiveValue(
            name,
            problem.value_by_name[name].nbytes,
            source_of(root[name]) if name in root else "",
            "output or gradient" if name in outputs else "activation",
        )
        for name in ordered
        if problem.value_by_name[name].nbytes
    )


def source_of(node: fx.Node) -> str:
    """The user's line that a node comes from, as "model.py:88"; "" where it is not known."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for path, line in reversed(frames):
        if not path.startswith(_TORCH_CODE):
            return f"{PurePath(path).name}:{line}"
    return f"{PurePath(frames[-1][0]).name}:{frames[-1][1]}" if frames else ""


def _module_of(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    return re.sub(r"\['?([^'\]]*)'?\]", r".\1", path).removeprefix("L.self.").removeprefix("L.")


def _op_name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, _torch.OpOverload):
        return target.name().split("::")[-1]
    return getattr(target, "__name__", str(target))
