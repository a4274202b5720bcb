"""A plan that was chosen, written out.

Enters: a stated graph and a plan. Leaves: a `Choice`: the two modules, the plan, and the peak that
they will have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from autoremat_solver import Phase, Plan, Problem, Solution, simulate
from autoremat_solver.plan import Status
from autoremat_solver.search.state import PROVEN
from torch import fx

from autoremat.emit.rewrite import rewrite
from autoremat.emit.split import partition
from autoremat.planning.torch_plan import TorchPlan
from autoremat.problem.subject import Subject
from autoremat.reserved.step import GraphEvents

TORCH = "torch's own partitioner"  # the method of a choice that is torch's
Modules = tuple[fx.GraphModule, fx.GraphModule]


@dataclass(frozen=True)
class Choice:
    """A plan, written out.

    Attributes:
        forward: its forward module.
        backward: its backward module.
        method: the strategy that found it.
        solution: plan, certificate and what the simulator says of it.
        peak_nbytes: the real peak that the modules will have, resident bytes included.
        needed_nbytes: that, or more: what the step then takes where later graphs of it need room.
        fits: whether that is within the budget.
        baseline: tells what the step takes without a plan of ours, by the meter of `peak_nbytes`.
            Asked for the first time, it may have to read generated code.
        baseline_time_us: tells the time of that, for which nothing is read.
        is_read: whether that meter is the code that Inductor generates, not the simulator.
        torchs: given for torch's own partition: what its plan is a plan of.
        code_us: what the kernels of that code take; None where that is not known.
        asked: what that code asks of a GPU's allocator; None where no such code was read.
        alone: where values may leave the device, what is found for the same budget if none does;
            None where nobody has looked.
        in_order: how the modules are written out; as of `rewrite`.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    method: str
    solution: Solution
    peak_nbytes: int
    needed_nbytes: int
    fits: bool
    baseline: Callable[[], Baseline]
    baseline_time_us: Callable[[], float]
    is_read: bool
    torchs: TorchPlan | None = None
    code_us: float | None = None
    asked: GraphEvents | None = None
    alone: Alone | None = None
    in_order: bool = True


@dataclass(frozen=True)
class Alone:
    """A plan without copies, where values may leave the device.

    Attributes:
        time_us: of its operations.
        peak_nbytes: as the simulator sees it.
        fits: whether that is within the budget.
        failed: why no plan with copies was compared, though it was tried; "" if one was.
    """

    time_us: float
    peak_nbytes: int
    fits: bool
    failed: str = ""

    @classmethod
    def of(cls, solution: Solution) -> Alone:
        """Of such a plan."""
        timeline, fits = solution.timeline, solution.status is not Status.INFEASIBLE
        return cls(timeline.time_us, timeline.peak_nbytes, fits)


@dataclass(frozen=True)
class Baseline:
    """The step without a plan of ours: under Inductor torch's own partition, if that is safe.

    Attributes:
        peak_nbytes: as of `Choice`; 0 where nobody has read it.
        time_us: of its operations, one by one.
        code_us: as of `Choice`.
    """

    peak_nbytes: int
    time_us: float
    code_us: float | None = None


def as_chosen(subject: Subject, choice: Choice) -> Subject:
    """The subject with the problem that the choice's plan is a plan of."""
    if choice.torchs is None:
        return subject
    return replace(subject, lowered=choice.torchs.lowered(subject.lowered, subject.joint))


def given(problem: Problem, plan: Plan, method: str) -> Solution:
    """A plan that nobody searched for; what is known of all plans is that they run all once."""
    return Solution(
        plan=plan,
        timeline=simulate(problem, plan),
        status=Status.FEASIBLE,
        bound_us=math.fsum(op.time_us for op in problem.ops if op.phase is not Phase.EITHER),
        floor_nbytes=problem.resident_nbytes,
        method=method,
        seconds=0.0,
    )


def recomputed_share(choice: Choice) -> float:
    """What a plan's operations take more than those of the step without a plan."""
    return choice.solution.timeline.time_us / max(1e-9, choice.baseline_time_us()) - 1


def as_proven(solution: Solution) -> Solution:
    """A solution whose plan fits, with the status that plan and bound have together."""
    is_optimal = solution.timeline.time_us <= solution.bound_us * (1 + PROVEN)
    return replace(solution, status=Status.OPTIMAL if is_optimal else Status.FEASIBLE)


def written_out(subject: Subject, plan: Plan, *, in_order: bool = True) -> Modules:
    """A plan, written out; arguments as of `rewrite`."""
    return partition(
        rewrite(
            subject.joint,
            subject.lowered,
            subject.constraints,
            plan,
            subject.host.folder if subject.host is not None else "",
            in_order=in_order,
        ),
        num_fwd_outputs=subject.joint.num_fwd_outputs,
        overwritten={node.name for node in subject.joint.overwritten},
    )
