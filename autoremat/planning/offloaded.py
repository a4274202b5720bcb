"""The choice where values may also leave the device.

Enters: a stated graph with a host, and a budget. Leaves: a `Choice` whose plan may offload.
Guarantees: it is never slower than what recompute alone was found to reach, nor is its peak higher:
by the solver's count, or where a compiler decides, by generated code; only what is one dense tensor
leaves.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import replace

import torch
from autoremat_solver import OffloadSolver, Problem, Solution, simulate
from autoremat_solver.effort import CutOff
from autoremat_solver.plan import Status
from autoremat_solver.search.state import PROVEN

from autoremat import _torch
from autoremat.host.memory import Host
from autoremat.planning.choice import Alone, Choice
from autoremat.planning.read import (
    GOOD_USE,
    best_of,
    fitting_by_reading,
    lean_by_reading,
)
from autoremat.planning.reader import Reader, is_faster
from autoremat.planning.simulated import as_simulated, choose_by_simulation, simulated_peaks
from autoremat.problem.subject import Subject

LEAST_NBYTES = 4096  # of a value that leaves: a page of a file
WORTH_COPIES = 0.03  # of the time: copies that save less are as likely to cost some
MOST_LETTERS = 120  # of what failed
MOST_READINGS = 4  # of the code of plans that send values away, per graph and budget


def choose_with_offload(
    subject: Subject, host: Host, budget_nbytes: int, *, time_limit_s: float, reads: bool
) -> Choice:
    """The fastest plan found that fits; if none does, the one of the smallest peak found.

    Args:
        subject: the graph, as it is stated.
        host: where values may wait.
        budget_nbytes: of the whole step.
        time_limit_s: for each search.
        reads: whether peaks and times are of the code that Inductor generates.
    """
    solver = OffloadSolver(
        subject.lowered.problem,
        host.free_nbytes,
        time_limit_s=time_limit_s,
        movable=movable(subject),
    )
    if reads:
        return _as_read(subject, solver, budget_nbytes)
    return _as_simulated(subject, solver, budget_nbytes)


def _as_simulated(subject: Subject, solver: OffloadSolver, budget_nbytes: int) -> Choice:
    solution, alone = solver.solve(budget_nbytes), solver.alone(budget_nbytes)
    if is_worthless(solution, alone, budget_nbytes):
        is_late = solution.status is Status.TIME_LIMIT
        solution = bounded(alone, solver)
        solution = replace(solution, status=Status.TIME_LIMIT) if is_late else solution
    peaks = simulated_peaks(subject.lowered, solution.plan)
    found = as_simulated(subject, solution, budget_nbytes, peaks)
    if not found.fits:
        leaner = choose_by_simulation(subject, solver.solver, budget_nbytes)
        if leaner.needed_nbytes < found.needed_nbytes:
            found = replace(leaner, solution=bounded(leaner.solution, solver))
    return replace(found, alone=Alone.of(alone))


def is_worthless(solution: Solution, alone: Solution, budget_nbytes: int) -> bool:
    """Whether a plan has copies that save next to nothing beside one without that fits."""
    fits = alone.timeline.peak_nbytes <= budget_nbytes
    if not (fits and solution.plan.offloaded):
        return False
    return solution.timeline.time_us * (1 + WORTH_COPIES) >= alone.timeline.time_us


def bounded(solution: Solution, solver: OffloadSolver) -> Solution:
    """A plan without copies as one of all plans, of which less is proven."""
    bound_us = min(solution.bound_us, solver.least_us)
    floor_nbytes = min(solution.floor_nbytes, solver.floor_nbytes)
    is_proven = solution.timeline.time_us <= bound_us * (1 + PROVEN)
    was_proven = solution.status is Status.OPTIMAL
    status = Status.FEASIBLE if was_proven and not is_proven else solution.status
    return replace(solution, bound_us=bound_us, floor_nbytes=floor_nbytes, status=status)


def _as_read(subject: Subject, solver: OffloadSolver, budget_nbytes: int) -> Choice:
    """What recompute alone reaches, and a few plans that send values away, all as compiled.

    Lean plans without copies are read only where nothing else fits.
    """
    reader = Reader(subject, budget_nbytes)
    alone = fitting_by_reading(reader, solver.solver)
    choices, failed = [] if alone is None else [alone], ""
    try:
        choices.extend(_that_send_away(reader, solver))
    except Exception as error:  # what fits is not lost to another
        if not any(choice.fits for choice in choices):
            raise
        if not any(choice.fits and choice.solution.plan.offloaded for choice in choices):
            failed = textwrap.shorten(f"{type(error).__name__}: {error}", MOST_LETTERS)
    if not any(choice.fits for choice in choices):
        choices += lean_by_reading(reader, solver.solver)
    best = best_of(choices, budget_nbytes)
    if alone is not None and alone.fits and not is_faster(best, alone, by=WORTH_COPIES):
        best = best_of([alone], budget_nbytes)
    if not best.solution.plan.offloaded:
        solution = bounded(best.solution, solver)
        return replace(best, solution=solution, alone=replace(Alone.of(solution), failed=failed))
    without = Alone.of(solver.alone(budget_nbytes) if alone is None else alone.solution)
    return replace(best, alone=replace(without, fits=alone is not None and without.fits))


def _that_send_away(reader: Reader, solver: OffloadSolver) -> Iterator[Choice]:
    """A few of them, each for the budget less what the last one's code takes above its model."""
    cut_off, target, both = CutOff(solver.time_limit_s), reader.budget_nbytes, True
    for _ in range(MOST_READINGS):
        solution = solver.solve(target)
        is_last = solution.status is Status.INFEASIBLE
        if is_last:
            solution = solver.smallest_peak()
        if not solution.plan.offloaded:
            return  # nothing that leaves is worth its way, by the model
        found = with_copies(reader.read(solution, both=both), solver.problem)
        both = both and not reader.ways_alike(solution)
        yield found
        is_used = found.needed_nbytes >= GOOD_USE * reader.budget_nbytes
        if is_last or (found.fits and (is_used or cut_off.is_over)):
            return
        above_nbytes = found.needed_nbytes - solution.timeline.peak_nbytes
        before, target = target, reader.budget_nbytes - above_nbytes
        if (target > before) != found.fits or target == before:
            return


def with_copies(choice: Choice, problem: Problem) -> Choice:
    """Its code takes as well what computing waits for copies, loses beside them, and asks."""
    if choice.code_us is None or not choice.solution.plan.offloaded:
        return choice
    plan = choice.solution.plan
    runs_us = math.fsum(problem.op_by_name[name].time_us for name in plan.schedule)
    copies_us = simulate(problem, plan).time_us - runs_us
    return replace(choice, code_us=choice.code_us + copies_us)


def movable(subject: Subject) -> frozenset[str]:
    """Values that one operation makes as one dense tensor of known sizes."""
    root, nbytes = subject.lowered.storages.root, subject.lowered.storages.nbytes
    return frozenset(
        name
        for name in subject.lowered.problem.value_by_name
        if nbytes.get(name, 0) >= LEAST_NBYTES
        and name in root
        and root[name].op == "call_function"
        and _is_whole(_torch.fake_value(root[name]), nbytes[name], subject.device)
    )


def _is_whole(value: object, nbytes: int, device: torch.device) -> bool:
    """Whether a tensor on the device is all of its storage, without symbols or gaps."""
    if not isinstance(value, torch.Tensor) or value.is_sparse:
        return False
    if value.device.type != device.type:
        return False
    if not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
        return False
    last = sum(
        (size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)
    )
    own_nbytes = value.numel() * value.element_size()
    return last + 1 == value.numel() and own_nbytes <= nbytes and not value.storage_offset()
