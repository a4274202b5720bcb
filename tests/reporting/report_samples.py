"""Reports without torch: a step of equal layers, and a report on one of its plans.

A layer is a chain of `width` operations. Its first value is saved; the others are made again
right before the layer's backward reads them.

    f0.0 -> f0.1 -> ... -> f1.0 -> ...        forward
    b0.0 <- b0.1 <- ... <- b1.0 <- ...        backward; each also makes the gradient of a weight
"""

from __future__ import annotations

from dataclasses import replace

from autoremat_solver import Link, Op, Phase, Plan, Problem, Status, StepKind, Value, simulate
from autoremat_solver.plan import Step
from autoremat_solver.plan_document import without_recompute

from autoremat.reporting import GraphReport, Report, ResidentParts, ValueAction, ValueReport
from autoremat.reporting.timeline import Place, timeline_of
from autoremat.reporting.waiting import Waiting, in_flight_nbytes, trips_of

UNIT_NBYTES = 1_000_000


def layered_step(layers: int, width: int) -> tuple[Problem, Plan]:
    """The step and its plan."""
    ops: list[Op] = []
    before: tuple[str, ...] = ()
    pairs = [(layer, i) for layer in range(layers) for i in range(width)]
    for layer, i in pairs:
        name = f"f{layer}.{i}"
        ops.append(Op(name, before, (f"x{layer}.{i}",), 100.0 + i, 4096 * i))
        before = (f"x{layer}.{i}",)
    gradient: tuple[str, ...] = ()
    for layer, i in reversed(pairs):
        made = (f"g{layer}.{i}", f"w{layer}.{i}")
        reads = (f"x{layer}.{i}", *gradient)
        ops.append(Op(f"b{layer}.{i}", reads, made, 200.0, 0, Phase.BACKWARD, recomputable=False))
        gradient = made[:1]
    sizes = {"x": UNIT_NBYTES, "g": UNIT_NBYTES, "w": UNIT_NBYTES // 100}
    values = tuple(Value(name, sizes[name[0]]) for op in ops for name in op.outputs)
    weights = tuple(value.name for value in values if value.name[0] == "w")
    problem = Problem(values, tuple(ops), weights, 3 * UNIT_NBYTES)
    schedule = [f"f{layer}.{i}" for layer, i in pairs]
    for layer in reversed(range(layers)):
        schedule += [f"f{layer}.{i}" for i in range(1, width)]
        schedule += [f"b{layer}.{i}" for i in reversed(range(width))]
    return problem, Plan.of(schedule)


def layered_report(layers: int = 4, width: int = 5, block: str = "block") -> Report:
    """A report on the plan of `layered_step`, within its budget.

    Args:
        layers: of the step.
        width: operations per layer.
        block: name of the modules inside a layer.
    """
    problem, plan = layered_step(layers, width)
    return _report(problem, plan, block)


def waiting_report() -> Report:
    """A report on a step of four layers without recompute whose first value waits elsewhere.

    It leaves as soon as it is made, comes back right before it is read, and so keeps computing
    waiting: 1 MB at 10 GB/s each way is 100 us.
    """
    problem, _ = layered_step(4, 1)
    link = Link(out_nbytes_per_us=1e4, in_nbytes_per_us=1e4, ask_us=7.0)
    problem = replace(problem, link=link)
    runs = [Step(StepKind.FIRST_RUN, op.name) for op in problem.ops]
    away = [Step(StepKind.OFFLOAD, "x0.0"), runs[1], runs[2], Step(StepKind.RELEASE, "x0.0")]
    back = [Step(StepKind.RELOAD, "x0.0"), runs[-1]]
    return _report(problem, Plan((runs[0], *away, *runs[3:-1], *back)), "block")


def _report(problem: Problem, plan: Plan, block: str) -> Report:
    timeline = timeline_of(problem, plan, lambda name: _place(name, block))
    planned, baseline = simulate(problem, plan), without_recompute(problem)
    graph = GraphReport(
        name="graph 0",
        predicted_peak_nbytes=planned.peak_nbytes,
        baseline_peak_nbytes=baseline.peak_nbytes,
        predicted_time_us=planned.time_us,
        baseline_time_us=baseline.time_us,
        bound_us=0.99 * planned.time_us,
        status=Status.FEASIBLE,
        method="by hand",
        solve_seconds=0.5,
        values=tuple(_value(op, block, plan) for op in problem.ops if op.name[0] == "f"),
        timeline=timeline,
        waiting=_waiting(problem, plan) if plan.offloaded else None,
        peak_step=timeline.steps[timeline.peak_step].name,
        peak_source="model.py:7",
    )
    return Report(
        budget_nbytes=planned.peak_nbytes + UNIT_NBYTES,
        resident=ResidentParts(2 * UNIT_NBYTES, batch_nbytes=UNIT_NBYTES),
        graphs=(graph,),
        compiler="eager",
        device="cpu",
        torch_version="2.13.0",
    )


def _place(name: str, block: str) -> Place:
    layer, i = name[1:].split(".")
    return Place(f"op{i}", f"model.layers.{layer}.{block}{i}", f"model.py:{i}")


def _waiting(problem: Problem, plan: Plan) -> Waiting:
    timeline = simulate(problem, plan)
    return Waiting(
        where="in /tmp/values",
        host_nbytes=10 * UNIT_NBYTES,
        host_peak_nbytes=timeline.host_peak_nbytes,
        in_flight_nbytes=in_flight_nbytes(problem, plan),
        stall_us=timeline.stall_us,
        alone_time_us=None,
        alone_peak_nbytes=0,
        alone_fits=False,
        trips=tuple(trips_of(problem, plan)),
    )


def _value(op: Op, block: str, plan: Plan) -> ValueReport:
    (name,) = op.outputs
    place, is_saved = _place(op.name, block), op.name.endswith(".0")
    saved = ValueAction.AWAY if name in plan.offloaded else ValueAction.SAVE
    return ValueReport(
        name=name,
        nbytes=UNIT_NBYTES,
        shape=(250, 1000),
        dtype="float32",
        action=saved if is_saved else ValueAction.RECOMPUTE,
        recomputes=0 if is_saved else 1,
        source=place.source,
        module=place.module,
        op=place.op,
        reason="saving it avoids work" if is_saved else "recomputed once, to free 1.0 MB",
        time_us=op.time_us,
        avoided_runs=1 if is_saved else 0,
        avoided_us=op.time_us if is_saved else 0.0,
    )
