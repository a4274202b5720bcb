"""Which plan a graph gets: the fastest known one whose real peak fits the budget.

Enters: a lowered joint graph and a budget. Leaves: a `Choice`: the two modules, the plan and the
peak that they will have. With the eager executor the simulator's peak is the real one. Inductor
fuses, reuses and reorders, so there every candidate's generated code is read (`inductor`), the
target is corrected, and the search repeats; what is returned fits by what was read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from autoremat_solver import Phase, Plan, Problem, ProblemError, Solution, Solver, simulate
from autoremat_solver.certificate import holds
from autoremat_solver.plan import Status
from autoremat_solver.policies import save_all_but
from autoremat_solver.search import PROVEN
from torch import fx

from autoremat import _torch
from autoremat.cost.calls import OpCost
from autoremat.emit.equivalence import first_difference
from autoremat.emit.rewrite import rewrite
from autoremat.emit.split import partition
from autoremat.graph.constraints import Constraints
from autoremat.graph.joint_graph import JointGraph, copy_module
from autoremat.graph.random_draws import is_seeded, keep_draws
from autoremat.inductor.hook import generate
from autoremat.planning.deadline import Deadline
from autoremat.planning.remembered import recall, remember
from autoremat.planning.torch_plan import TorchPlan, torch_plan
from autoremat.problem.lower import Lowered, as_written, without_spare_states
from autoremat.progress import during

MOST_READINGS = 6  # of generated wrappers, per graph and budget, until a plan fits
LOOSENINGS = 2  # readings spent after that on using the budget better
GOOD_USE = 0.92  # of the budget: a plan that reaches it is not loosened further
TORCH = "torch's own partitioner"  # the method of a choice that is torch's
LEAN_TARGETS = (1.0, 1.1, 1.25, 1.5)  # times the smallest modelled peak above what is resident
LEAN_USE = 0.99  # of the budget: a remembered leanest plan that reaches it has little left to win
REMEMBERED = "remembered"
FASTEST, SAVE_ALL = "fastest", "save-all"  # plans that are known without a search
FIRST_SHARE = 0.5  # of the time limit, for the first search, however long readings took before
LATER_SHARE = 0.3  # of what is left of it, for each solve after the first: it knows more then
AT_ONCE_S = 2.0  # for the plan that a budget below the resident bytes is refused with


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
        is_read: whether that meter is the code that Inductor generates, not the simulator.
        torchs: given for torch's own partition: what its plan is a plan of.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    method: str
    solution: Solution
    peak_nbytes: int
    needed_nbytes: int
    fits: bool
    baseline: Callable[[], Baseline]
    is_read: bool
    torchs: TorchPlan | None = None


class Baseline(NamedTuple):
    """The step without a plan of ours: under Inductor torch's own partition, if that is safe."""

    peak_nbytes: int
    time_us: float


@dataclass(frozen=True)
class Subject:
    """A graph, stated for the solver.

    Attributes:
        joint: forward and backward.
        constraints: what may not be recomputed, or must be.
        lowered: its operations in their shell.
        device: where they run.
        costs: time and workspace of each operation.
    """

    joint: JointGraph
    constraints: Constraints
    lowered: Lowered
    device: torch.device
    costs: Mapping[fx.Node, OpCost]


def as_chosen(subject: Subject, choice: Choice) -> Subject:
    """The subject with the problem that the choice's plan is a plan of."""
    if choice.torchs is None:
        return subject
    return replace(subject, lowered=choice.torchs.lowered(subject.lowered, subject.joint))


def choose_by_simulation(subject: Subject, solver: Solver, budget_nbytes: int) -> Choice:
    """The solver's answer, taken at its word: for executors that follow the plan to the byte."""
    problem = subject.lowered.problem
    solution = solver.solve(budget_nbytes)
    if solution.status is Status.INFEASIBLE:
        solution = _least_known(subject.lowered, solver, solution, budget_nbytes)
    peaks = _simulated_peaks(subject.lowered, solution.plan)
    if solution.status is Status.INFEASIBLE or solution.method == REMEMBERED:
        remember(problem, solution.plan, peaks.needed_nbytes)
    return _as_simulated(subject, solution, budget_nbytes, peaks)


def _least_known(
    lowered: Lowered, solver: Solver, smallest: Solution, budget_nbytes: int
) -> Solution:
    """Of the plans known, the fastest whose real peak fits; if none does, the smallest.

    The solver counts the state of every draw, the real peak only those that are replayed: a plan
    that repeats nothing may take less than the smallest that a short search has found.
    """
    problem, fastest = lowered.problem, solver.fastest()
    known = _recalled(problem, fastest)
    found = [known] if known is not None else []
    found += [smallest, _with_plan(fastest, problem, fastest.plan, FASTEST)]
    with suppress(ProblemError):  # some values may not be saved
        found.append(_with_plan(fastest, problem, save_all_but(problem), SAVE_ALL))
    peaks = [_simulated_peaks(lowered, solution.plan).needed_nbytes for solution in found]
    fitting = [s for s, peak in zip(found, peaks, strict=True) if peak <= budget_nbytes]
    if fitting:
        best = min(fitting, key=lambda s: s.timeline.time_us)
        return replace(best, status=Status.FEASIBLE) if best is smallest else best
    return replace(found[peaks.index(min(peaks))], status=Status.INFEASIBLE)


def choose_fixed(
    subject: Subject, plan: Plan, method: str, budget_nbytes: int, *, reads: bool
) -> Choice:
    """A given plan, whether it fits or not.

    Args:
        subject: the graph.
        plan: a valid plan of it.
        method: where the plan comes from.
        budget_nbytes: what it should fit.
        reads: whether the real peak is read from the code that Inductor generates.
    """
    problem = subject.lowered.problem
    solution = _given(problem, plan, method)
    if reads:
        return _Reader(subject, budget_nbytes).read(solution)
    peaks = _simulated_peaks(subject.lowered, plan)
    return _as_simulated(subject, solution, budget_nbytes, peaks)


def _given(problem: Problem, plan: Plan, method: str) -> Solution:
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


Modules = tuple[fx.GraphModule, fx.GraphModule]


def choose_without_search(subject: Subject, budget_nbytes: int, *, reads: bool) -> Choice:
    """The leanest plan that is known at once, for a budget that no plan can fit.

    What an earlier search has left, or else what is lean among the plans that nothing has to be
    solved for. It is remembered, so that its peak is accepted as a budget.

    Args:
        subject: the graph.
        budget_nbytes: below what is resident.
        reads: whether the real peak is read from the code that Inductor generates.
    """
    problem = subject.lowered.problem
    known = recall(problem)
    plans = {"local search": Solver(problem, time_limit_s=AT_ONCE_S).lean_plan()}
    with suppress(ProblemError):  # some values may not be saved
        plans[SAVE_ALL] = save_all_but(problem)
    peaks = {
        name: _simulated_peaks(subject.lowered, plan).needed_nbytes for name, plan in plans.items()
    }
    if known is not None:
        plans[REMEMBERED], peaks[REMEMBERED] = known.plan, known.peak_nbytes
    best: Choice | None = None
    for name in sorted(plans, key=lambda name: peaks[name]):
        if best is None or peaks[name] < best.needed_nbytes:  # generated code may take more
            new = choose_fixed(subject, plans[name], name, budget_nbytes, reads=reads)
            best = new if best is None or new.needed_nbytes < best.needed_nbytes else best
    assert best is not None, "there is a plan"
    remember(problem, best.solution.plan, best.needed_nbytes)
    return best


class Peaks(NamedTuple):
    """Of a plan written out; see `Choice`."""

    nbytes: int
    needed_nbytes: int


def _simulated_peaks(lowered: Lowered, plan: Plan) -> Peaks:
    """Peaks of the plan, without the states of draws that it repeats nowhere."""
    needed_nbytes = _simulated_peak_nbytes(lowered.problem, plan)
    if not lowered.shell.free_nbytes:
        return Peaks(needed_nbytes, needed_nbytes)
    alone = replace(lowered, shell=replace(lowered.shell, room_nbytes=0))
    return Peaks(_simulated_peak_nbytes(alone.problem, plan), needed_nbytes)


def _simulated_peak_nbytes(problem: Problem, plan: Plan) -> int:
    return simulate(without_spare_states(problem, plan), plan).peak_nbytes


def _as_simulated(subject: Subject, solution: Solution, budget_nbytes: int, peaks: Peaks) -> Choice:
    problem = subject.lowered.problem
    once = as_written(problem)

    def baseline() -> Baseline:
        peak_nbytes = _simulated_peaks(subject.lowered, once).nbytes
        return Baseline(peak_nbytes, simulate(problem, once).time_us)

    modules = _modules(subject, solution.plan)
    fits = peaks.needed_nbytes <= budget_nbytes
    return Choice(*modules, solution.method, solution, *peaks, fits, baseline, is_read=False)


def choose_torch(subject: Subject, budget_nbytes: int) -> Choice | None:
    """Torch's own partition; None if it is not safe."""
    reader = _Reader(subject, budget_nbytes)
    return reader.read_own() if reader.unplanned.own is not None else None


def choose_by_reading(subject: Subject, solver: Solver, budget_nbytes: int) -> Choice:
    """The fastest of a few candidates whose generated code is read to fit the budget.

    The solver is asked for a target, starting from the budget; each reading shifts the target by
    how far the model was off. If none fits, a fixed ladder of lean plans decides: it does not
    depend on the budget, so the peak that it reaches is accepted when it is asked for. A reading
    lasts as long as half a compile: at the budget that a refusal named there is one search.

    The solver's time limit is for all of it. However late it is, three plans at most are read:
    torch's own partition, if it may fit, the first that is searched for, and the leanest.
    """
    deadline = Deadline(solver.time_limit_s)
    reader = _Reader(subject, budget_nbytes)
    fastest = solver.fastest(time_limit_s=LATER_SHARE * deadline.limit_s)
    own = _own_if_it_may_fit(reader, fastest, budget_nbytes, strict=solver.strict)
    if own is not None and own.fits:
        return own
    target = budget_nbytes
    best = _remembered(reader, subject, fastest, budget_nbytes)
    loosenings = 0 if best is None else LOOSENINGS
    for turn in range(MOST_READINGS):
        if deadline.is_over and (turn or best is not None):
            break
        limit_s = LATER_SHARE * deadline.left_s if turn else FIRST_SHARE * deadline.limit_s
        solution = solver.solve(target, time_limit_s=limit_s)
        if solution.status is Status.INFEASIBLE:
            break
        choice = reader.read(solution)
        if choice.fits and (best is None or _time(choice) < _time(best)):
            best = choice
        if best is not None:
            loosenings += 1
            used = best.needed_nbytes >= GOOD_USE * budget_nbytes
            if used or loosenings > LOOSENINGS or _same(solution, fastest):
                break
        next_target = _shifted(target, choice, budget_nbytes, subject)
        if next_target == target:
            break
        target = next_target
    return best or _leanest(reader, solver, fastest, own, deadline)


def _own_if_it_may_fit(
    reader: _Reader, fastest: Solution, budget_nbytes: int, *, strict: bool
) -> Choice | None:
    """Torch's own partition: with room for it, nothing beats it.

    Where what it saves alone is above the budget, no code is generated. It knows nothing of what
    the user asked for.
    """
    own = None if reader.subject.constraints.asked else reader.unplanned.own
    if own is None or own.least_nbytes > budget_nbytes:
        return None
    return reader.read_own(fastest, strict=strict)


def _remembered(
    reader: _Reader, subject: Subject, fastest: Solution, budget_nbytes: int
) -> Choice | None:
    """The leanest plan known, where the budget is the one that it was named for, or just above."""
    known = recall(subject.lowered.problem)
    if known is None or not LEAN_USE * budget_nbytes <= known.peak_nbytes <= budget_nbytes:
        return None
    solution = _recalled(subject.lowered.problem, fastest)
    assert solution is not None
    choice = reader.read(solution)
    return choice if choice.fits else None


def _recalled(problem: Problem, fastest: Solution) -> Solution | None:
    """The leanest plan remembered."""
    known = recall(problem)
    return None if known is None else _with_plan(fastest, problem, known.plan, REMEMBERED)


def _with_plan(fastest: Solution, problem: Problem, plan: Plan, method: str) -> Solution:
    """Another plan, with what the solver proved of plans under any budget.

    What it proved for one budget would not hold for a plan whose modelled peak is above that.
    """
    unproven = fastest.status is Status.UNPROVEN
    return replace(
        fastest,
        plan=plan,
        timeline=simulate(problem, plan),
        status=Status.UNPROVEN if unproven else Status.FEASIBLE,
        method=method,
    )


def _leanest(
    reader: _Reader, solver: Solver, fastest: Solution, own: Choice | None, deadline: Deadline
) -> Choice:
    """The smallest real peak of all plans known; the smallest modelled one need not have it.

    Torch's own partition is among them, if `own` is given.
    """
    problem = reader.subject.lowered.problem
    known = _recalled(problem, fastest)
    choices = [] if known is None else [reader.read(known)]  # what a refusal named stays reachable
    for solution in _lean_plans(solver, fastest, deadline):
        choices.append(reader.read(solution))
        if deadline.is_over:
            break
    choices += reader.seen
    best = min(choices, key=lambda choice: choice.needed_nbytes)
    if own is not None and own.needed_nbytes < best.needed_nbytes:
        return own
    remember(problem, best.solution.plan, best.needed_nbytes)
    return best


def _lean_plans(solver: Solver, fastest: Solution, deadline: Deadline) -> Iterator[Solution]:
    """The smallest modelled peak, a ladder above it, and the other end."""
    smallest = solver.smallest_peak(time_limit_s=LATER_SHARE * deadline.left_s)
    yield smallest
    resident = solver.problem.resident_nbytes
    above = smallest.timeline.peak_nbytes - resident
    for times in LEAN_TARGETS[1:]:
        limit_s = LATER_SHARE * deadline.left_s
        yield solver.solve(resident + int(times * above), time_limit_s=limit_s)
    yield fastest


@dataclass(frozen=True)
class _Own:
    """Torch's own partition, written out.

    Attributes:
        forward: its forward module.
        backward: its backward module.
        torchs: what it does, as a plan.
        problem: of which that is a plan.
        least_nbytes: what it takes at least: what is resident, and the tensors that it saves.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    torchs: TorchPlan
    problem: Problem
    least_nbytes: int


class _Unplanned:
    """A graph as it runs under Inductor without a plan of ours."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    @cached_property
    def own(self) -> _Own | None:
        """Torch's own partition; None if it is not safe, or if no plan says what it does.

        It is not safe where its backward would read an input that the forward overwrites, or
        compute something else than the joint graph, as with random numbers that it draws again.
        """
        joint, lowered = self._subject.joint, self._subject.lowered
        module = copy_module(joint.module)
        if any(is_seeded(node) for node in self._subject.constraints.run_once):
            keep_draws(module)
        forward, backward = _torch.min_cut(module, num_fwd_outputs=joint.num_fwd_outputs)
        if first_difference(joint.module, forward, backward, joint.num_fwd_outputs) is not None:
            return None
        inputs = {node.name for node in backward.graph.find_nodes(op="placeholder")}
        if not inputs.isdisjoint(node.name for node in joint.overwritten):
            return None
        torchs = torch_plan(joint, lowered, forward, backward)
        if torchs is None:
            return None
        problem = torchs.lowered(lowered, joint).problem
        saved_nbytes = sum(lowered.storages.fake_nbytes[name] for name in torchs.saved)
        return _Own(forward, backward, torchs, problem, problem.resident_nbytes + saved_nbytes)

    @cached_property
    def peaks(self) -> Peaks:
        """Of torch's own partition; else of a plan that recomputes what it must alone."""
        if self.own is not None:
            return generated_peaks(self._subject, self.own.forward, self.own.backward)
        return generated_peaks(self._subject, *_modules(self._subject, self._plan))

    def baseline(self) -> Baseline:
        own, problem = self.own, self._subject.lowered.problem
        if own is not None:
            return Baseline(self.peaks.nbytes, simulate(own.problem, own.torchs.plan).time_us)
        return Baseline(self.peaks.nbytes, simulate(problem, self._plan).time_us)

    @property
    def _plan(self) -> Plan:
        problem = self._subject.lowered.problem
        return save_all_but(problem, {v.name for v in problem.values if v.must_recompute})


def _shifted(target: int, choice: Choice, budget_nbytes: int, subject: Subject) -> int:
    """The next target for the model: moved by what the last reading missed the budget by."""
    modelled = choice.solution.timeline.peak_nbytes
    resident = subject.lowered.problem.resident_nbytes
    scale = (modelled - resident) / max(1, choice.needed_nbytes - resident)
    aimed = resident + int((budget_nbytes - resident) * scale)
    if choice.fits:
        return max(aimed, target + 1)
    return min(aimed, modelled - 1, target - 1)


def _time(choice: Choice) -> float:
    return choice.solution.timeline.time_us


def _same(one: Solution, other: Solution) -> bool:
    return one.plan == other.plan


class _Reader:
    """Writes plans out and reads the code that Inductor generates for them, each plan once."""

    def __init__(self, subject: Subject, budget_nbytes: int) -> None:
        self.subject = subject
        self.unplanned = _Unplanned(subject)
        self._budget_nbytes = budget_nbytes
        self._seen: dict[Plan, Choice] = {}

    @property
    def seen(self) -> list[Choice]:
        """What was read so far."""
        return list(self._seen.values())

    def read(self, solution: Solution) -> Choice:
        if solution.plan not in self._seen:
            modules = _modules(self.subject, solution.plan)
            peaks = generated_peaks(self.subject, *modules)
            self._seen[solution.plan] = self._choice(modules, solution, peaks)
        return self._seen[solution.plan]

    def read_own(self, fastest: Solution | None = None, *, strict: bool = False) -> Choice:
        """Torch's own partition, which exists.

        Args:
            fastest: what was proven of our plans; it holds for torch's where that is one of them.
            strict: raise where it does not hold all the same.
        """
        own = self.unplanned.own
        assert own is not None
        solution = _given(own.problem, own.torchs.plan, TORCH)
        if fastest is not None:
            bound_us = solution.bound_us
            if own.torchs.is_of(self.subject.lowered.problem):
                bound_us = fastest.bound_us
            solution = replace(solution, bound_us=bound_us, seconds=fastest.seconds)
        solution = _judged(solution, strict=strict)
        choice = self._choice((own.forward, own.backward), solution, self.unplanned.peaks)
        return replace(choice, torchs=own.torchs)

    def _choice(self, modules: Modules, solution: Solution, peaks: Peaks) -> Choice:
        fits = peaks.needed_nbytes <= self._budget_nbytes
        baseline = self.unplanned.baseline
        return Choice(*modules, solution.method, solution, *peaks, fits, baseline, is_read=True)


def _judged(solution: Solution, *, strict: bool) -> Solution:
    """The status that a plan and its bound have together."""
    time_us, bound_us = solution.timeline.time_us, solution.bound_us
    if not holds("bound in us", bound_us, time_us, strict=strict):
        return replace(solution, bound_us=0.0, status=Status.UNPROVEN)
    is_optimal = time_us <= bound_us * (1 + PROVEN)
    return replace(solution, status=Status.OPTIMAL if is_optimal else Status.FEASIBLE)


@during("read")
def generated_peaks(subject: Subject, forward: fx.GraphModule, backward: fx.GraphModule) -> Peaks:
    """Peaks of the code that Inductor generates for two modules, resident bytes included."""
    joint, shell, storages = subject.joint, subject.lowered.shell, subject.lowered.storages
    first = generate(
        forward,
        is_backward=False,
        owned={},
        num_visible_outputs=joint.num_fwd_outputs,
        device=subject.device,
    )
    results = _torch.arg_tree_leaves(*forward.graph.output_node().args)
    returned = first.memory.returned
    held = dict(found for found in returned[: joint.num_fwd_outputs] if found is not None)
    owned = {
        node.name: found
        for node, found in zip(results, returned, strict=True)
        if isinstance(node, fx.Node) and found is not None and found[0] not in held
    }
    for node in joint.tangents:
        for name in storages.of_node[node]:
            key = -2 - len(owned) - len(held)  # a storage of its own
            if name in shell.held:
                held[key] = storages.nbytes[name]
            else:
                owned[node.name] = (key, storages.nbytes[name])
    second = generate(
        backward,
        is_backward=True,
        owned=owned,
        num_visible_outputs=0,
        device=subject.device,
        strides=first.strides,
        donated=_torch.donated_inputs(forward, backward, num_fwd_outputs=joint.num_fwd_outputs),
    )
    held_nbytes = sum(held.values()) + shell.later_gradients_nbytes
    after = held_nbytes + second.memory.returned_nbytes + shell.optimizer_nbytes
    crossing_nbytes = held_nbytes + sum(dict(owned.values()).values())
    peak_nbytes = max(
        first.memory.peak_nbytes,
        crossing_nbytes + shell.layout_nbytes,
        held_nbytes + second.memory.peak_nbytes,
        after,
    )
    needed_nbytes = max(peak_nbytes, crossing_nbytes + shell.free_nbytes)
    return Peaks(shell.resident_nbytes + peak_nbytes, shell.resident_nbytes + needed_nbytes)


def _modules(subject: Subject, plan: Plan) -> Modules:
    """A plan, written out."""
    return partition(
        rewrite(subject.joint, subject.lowered, subject.constraints, plan),
        num_fwd_outputs=subject.joint.num_fwd_outputs,
        overwritten={node.name for node in subject.joint.overwritten},
    )
