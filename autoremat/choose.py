"""Which plan a graph gets: the fastest known one whose real peak fits the budget.

Enters: a lowered joint graph and a budget. Leaves: a `Choice`: the two modules, the plan and the
peak that they will have. With the eager executor the simulator's peak is the real one. Inductor
fuses, reuses and reorders, so there every candidate's generated code is read (`inductor`), the
target is corrected, and the search repeats; what is returned fits by what was read.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from autoremat_solver import Phase, Plan, Problem, ProblemError, Solution, Solver, simulate
from autoremat_solver.plan import Status
from autoremat_solver.policies import save_all_but
from torch import fx

from autoremat import _torch
from autoremat.capture import JointGraph, copy_module
from autoremat.constraints import Constraints
from autoremat.draws import is_seeded, keep_draws
from autoremat.inductor import generate
from autoremat.lean_plans import recall, remember
from autoremat.lower import (
    LATER_GRADIENTS,
    Lowered,
    held_tangents,
    layout_nbytes,
    room_nbytes,
    without_room,
    without_spare_states,
)
from autoremat.partition import partition
from autoremat.progress import during
from autoremat.rewrite import rewrite
from autoremat.same_step import first_difference

MOST_READINGS = 6  # of generated wrappers, per graph and budget, until a plan fits
LOOSENINGS = 2  # readings spent after that on using the budget better
GOOD_USE = 0.92  # of the budget: a plan that reaches it is not loosened further
TORCH = "torch's own partitioner"  # the method of a choice that is torch's
LEAN_TARGETS = (1.0, 1.1, 1.25, 1.5)  # times the smallest modelled peak above what is resident
LEAN_USE = 0.99  # of the budget: a remembered leanest plan that reaches it has little left to win
REMEMBERED = "remembered"
FASTEST, SAVE_ALL = "fastest", "save-all"  # plans that are known without a search
AT_ONCE_S = 2.0  # for the plan that a budget below the resident bytes is refused with
LATER_SHARE = 0.3  # of the solver's time limit for each solve after the first: it knows more then


@dataclass(frozen=True)
class Choice:
    """A plan, written out.

    Attributes:
        forward: its forward module.
        backward: its backward module.
        method: the strategy that found it.
        solution: plan, certificate and what the simulator says of it; for torch's own partition
            the fastest plan, which models it.
        peak_nbytes: the real peak that the modules will have, resident bytes included.
        needed_nbytes: that, or more: what the step then takes where later graphs of it need room.
        fits: whether that is within the budget.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    method: str
    solution: Solution
    peak_nbytes: int
    needed_nbytes: int
    fits: bool


@dataclass(frozen=True)
class Subject:
    """A graph to choose a plan for, after lowering."""

    joint: JointGraph
    constraints: Constraints
    lowered: Lowered
    device: torch.device


def choose_by_simulation(subject: Subject, solver: Solver, budget_nbytes: int) -> Choice:
    """The solver's answer, taken at its word: for executors that follow the plan to the byte."""
    problem = subject.lowered.problem
    solution = solver.solve(budget_nbytes)
    if solution.status is Status.INFEASIBLE:
        solution = _least_known(problem, solver, solution, budget_nbytes)
    peaks = _simulated_peaks(problem, solution.plan)
    if solution.status is Status.INFEASIBLE or solution.method == REMEMBERED:
        remember(problem, solution.plan, peaks.needed_nbytes)
    return _write_out(subject, solution, budget_nbytes, lambda f, b: peaks)


def _least_known(
    problem: Problem, solver: Solver, smallest: Solution, budget_nbytes: int
) -> Solution:
    """Of the plans known, the fastest whose real peak fits; if none does, the smallest.

    The solver counts the state of every draw, the real peak only those that are replayed: a plan
    that repeats nothing may take less than the smallest that a short search has found.
    """
    known = _recalled(problem, smallest)
    found = [known] if known is not None else []
    found += [smallest, _with_plan(smallest, problem, solver.fastest().plan, FASTEST)]
    with suppress(ProblemError):  # some values may not be saved
        found.append(_with_plan(smallest, problem, save_all_but(problem), SAVE_ALL))
    peaks = [_simulated_peaks(problem, solution.plan).needed_nbytes for solution in found]
    fitting = [s for s, peak in zip(found, peaks, strict=True) if peak <= budget_nbytes]
    if fitting:
        return replace(min(fitting, key=lambda s: s.timeline.time_us), status=Status.FEASIBLE)
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
    timeline = simulate(problem, plan)
    once_us = math.fsum(op.time_us for op in problem.ops if op.phase is not Phase.EITHER)
    solution = Solution(
        plan=plan,
        timeline=timeline,
        status=Status.FEASIBLE,
        bound_us=min(once_us, timeline.time_us),
        floor_nbytes=problem.resident_nbytes,
        method=method,
        seconds=0.0,
    )
    if reads:
        return _Reader(subject, budget_nbytes).read(solution)
    peaks = _simulated_peaks(problem, plan)
    return _write_out(subject, solution, budget_nbytes, lambda f, b: peaks)


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
    peaks = {name: _simulated_peaks(problem, plan).needed_nbytes for name, plan in plans.items()}
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


def _simulated_peaks(problem: Problem, plan: Plan) -> Peaks:
    """Peaks of the plan, without the states of draws that it repeats nowhere."""
    spared = without_spare_states(problem, plan)
    needed_nbytes = simulate(spared, plan).peak_nbytes
    if not room_nbytes(problem):
        return Peaks(needed_nbytes, needed_nbytes)
    return Peaks(simulate(without_room(spared), plan).peak_nbytes, needed_nbytes)


def choose_torch(subject: Subject, plan: Plan, budget_nbytes: int) -> Choice | None:
    """Torch's own partition, modelled by a plan; None if it is not safe."""
    model = choose_fixed(subject, plan, TORCH, budget_nbytes, reads=False).solution
    return _torch_choice(subject, model, sys.maxsize, budget_nbytes)


def choose_by_reading(subject: Subject, solver: Solver, budget_nbytes: int) -> Choice:
    """The fastest of a few candidates whose generated code is read to fit the budget.

    The solver is asked for a target, starting from the budget; each reading shifts the target by
    how far the model was off. If none fits, a fixed ladder of lean plans decides: it does not
    depend on the budget, so the peak that it reaches is accepted when it is asked for. A reading
    lasts as long as half a compile: at the budget that a refusal named there is one search.
    """
    reader = _Reader(subject, budget_nbytes)
    fastest = solver.fastest()
    own = None  # torch's own partition knows nothing of what the user asked for
    if not subject.constraints.asked:
        own = _torch_choice(subject, fastest, budget_nbytes, budget_nbytes)
    if own is not None and own.fits:
        return own
    target = budget_nbytes
    best = _remembered(reader, subject, fastest, budget_nbytes)
    loosenings = 0 if best is None else LOOSENINGS
    for turn in range(MOST_READINGS):
        with _limited(solver, 1.0 if turn == 0 else LATER_SHARE):
            solution = solver.solve(target)
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
    return best or _leanest(reader, solver, subject, own)


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


@contextmanager
def _limited(solver: Solver, share: float) -> Iterator[None]:
    """Give each solve in the block a share of the solver's time limit."""
    before_s = solver.time_limit_s
    solver.time_limit_s = share * before_s
    try:
        yield
    finally:
        solver.time_limit_s = before_s


def _recalled(problem: Problem, found: Solution) -> Solution | None:
    """The leanest plan remembered, with what the solver proved for a budget at least as large."""
    known = recall(problem)
    return None if known is None else _with_plan(found, problem, known.plan, REMEMBERED)


def _with_plan(found: Solution, problem: Problem, plan: Plan, method: str) -> Solution:
    """Another plan, with what the solver proved."""
    timeline = simulate(problem, plan)
    return replace(
        found,
        plan=plan,
        timeline=timeline,
        status=Status.FEASIBLE,
        bound_us=min(found.bound_us, timeline.time_us),
        method=method,
    )


def _leanest(reader: _Reader, solver: Solver, subject: Subject, own: Choice | None) -> Choice:
    """The smallest real peak of all plans known; the smallest modelled one need not have it.

    Torch's own partition is among them, if `own` is given.
    """
    smallest = solver.smallest_peak()
    resident = subject.lowered.problem.resident_nbytes
    above = smallest.timeline.peak_nbytes - resident
    with _limited(solver, LATER_SHARE):
        plans = [smallest, *(solver.solve(resident + int(k * above)) for k in LEAN_TARGETS[1:])]
    known = _recalled(subject.lowered.problem, smallest)
    plans += [known] if known is not None else []
    plans.append(solver.fastest())
    known_choices = [*map(reader.read, plans), *reader.seen]
    best = min(known_choices, key=lambda choice: choice.needed_nbytes)
    if own is not None and own.needed_nbytes < best.needed_nbytes:
        return own
    remember(subject.lowered.problem, best.solution.plan, best.needed_nbytes)
    return best


def _torch_choice(
    subject: Subject, fastest: Solution, most_nbytes: int, budget_nbytes: int
) -> Choice | None:
    """Torch's own partition, if it is safe and may fit: with room for it, nothing beats it.

    Where what it saves alone is above `most_nbytes`, no code is generated.

    It is not safe where its backward would read an input that the forward overwrites, or compute
    something else than the joint graph, as with random numbers that it draws again.
    """
    joint, storages = subject.joint, subject.lowered.storages
    module = copy_module(joint.module)
    if any(is_seeded(node) for node in subject.constraints.run_once):
        keep_draws(module)
    forward, backward = _torch.min_cut(module, num_fwd_outputs=joint.num_fwd_outputs)
    if first_difference(joint.module, forward, backward, joint.num_fwd_outputs) is not None:
        return None
    inputs = {node.name for node in backward.graph.find_nodes(op="placeholder")}
    if not inputs.isdisjoint(node.name for node in joint.overwritten):
        return None
    kept = read_by(subject, backward)
    saved_nbytes = sum(storages.nbytes[name] for name in kept - storages.resident)
    if subject.lowered.problem.resident_nbytes + saved_nbytes > most_nbytes:
        return None
    peaks = generated_peaks(subject, forward, backward)
    fits = peaks.needed_nbytes <= budget_nbytes
    return Choice(forward, backward, TORCH, fastest, peaks.nbytes, peaks.needed_nbytes, fits)


def read_by(subject: Subject, backward: fx.GraphModule) -> set[str]:
    """Names of the storages that a backward module is given."""
    inputs = {node.name for node in backward.graph.find_nodes(op="placeholder")}
    of_node = subject.lowered.storages.of_node
    return {name for node in subject.joint.nodes if node.name in inputs for name in of_node[node]}


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
    return one.plan.schedule == other.plan.schedule


class _Reader:
    """Writes plans out and reads the code that Inductor generates for them, each plan once."""

    def __init__(self, subject: Subject, budget_nbytes: int) -> None:
        self._subject = subject
        self._budget_nbytes = budget_nbytes
        self._seen: dict[Plan, Choice] = {}

    @property
    def seen(self) -> list[Choice]:
        """What was read so far."""
        return list(self._seen.values())

    def read(self, solution: Solution) -> Choice:
        if solution.plan not in self._seen:
            self._seen[solution.plan] = _write_out(
                self._subject, solution, self._budget_nbytes, self._real_peaks
            )
        return self._seen[solution.plan]

    def _real_peaks(self, forward: fx.GraphModule, backward: fx.GraphModule) -> Peaks:
        return generated_peaks(self._subject, forward, backward)


@during("read")
def generated_peaks(subject: Subject, forward: fx.GraphModule, backward: fx.GraphModule) -> Peaks:
    """Peaks of the code that Inductor generates for two modules, resident bytes included."""
    joint, problem, storages = subject.joint, subject.lowered.problem, subject.lowered.storages
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
            if node in held_tangents(joint, storages):
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
    held_nbytes = sum(held.values())
    if LATER_GRADIENTS in problem.value_by_name:
        held_nbytes += problem.value_by_name[LATER_GRADIENTS].nbytes
    optimizer = max((op.workspace_nbytes for op in problem.ops[-1:] if not op.outputs), default=0)
    after = held_nbytes + second.memory.returned_nbytes + optimizer
    crossing_nbytes = held_nbytes + sum(dict(owned.values()).values())
    peak_nbytes = max(
        first.memory.peak_nbytes,
        crossing_nbytes + layout_nbytes(problem),
        held_nbytes + second.memory.peak_nbytes,
        after,
    )
    needed_nbytes = max(peak_nbytes, crossing_nbytes + room_nbytes(problem))
    return Peaks(problem.resident_nbytes + peak_nbytes, problem.resident_nbytes + needed_nbytes)


def _write_out(
    subject: Subject,
    solution: Solution,
    budget_nbytes: int,
    real_peaks: Callable[[fx.GraphModule, fx.GraphModule], Peaks],
) -> Choice:
    rewritten = rewrite(subject.joint, subject.lowered, subject.constraints, solution.plan)
    forward, backward = partition(
        rewritten,
        num_fwd_outputs=subject.joint.num_fwd_outputs,
        overwritten={node.name for node in subject.joint.overwritten},
    )
    peaks = real_peaks(forward, backward)
    fits = peaks.needed_nbytes <= budget_nbytes
    return Choice(forward, backward, solution.method, solution, *peaks, fits)
