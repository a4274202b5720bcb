"""The choice where a compiler decides the real peak: each candidate's generated code is read.

Enters: a stated graph, its solver and a budget. Leaves: a `Choice`. Inductor fuses, reuses and
reorders; so the solver's target is corrected by each reading, and the search repeats. Guarantees:
what is returned as fitting fits by what was read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from autoremat_solver import Problem, Solution, Solver, simulate
from autoremat_solver.effort import CutOff
from autoremat_solver.plan import Status

from autoremat.planning.choice import Choice
from autoremat.planning.corrected import corrected
from autoremat.planning.peers import BY_LAYER, faster_peers, layer_by_layer
from autoremat.planning.reader import Reader, fastest_of, is_faster, leanest, model_us
from autoremat.planning.simulated import leanest_at_once, searched_by, with_plan
from autoremat.problem.subject import Subject

MOST_READINGS = 6  # of generated wrappers, per graph and budget, until a plan fits
SURE_READINGS = 2  # of those, whatever the time: a ladder of lean plans has to be read as well
LOOSENINGS = 2  # readings spent after that on using the budget better
GOOD_USE = 0.92  # of the budget: a plan that reaches it is not loosened further
LEAN_TARGETS = (1.0, 1.1, 1.25, 1.5)  # times the smallest modelled peak above what is resident
ALIKE = 0.005  # a gap that no reading, nor any step, would tell from none
SLOWER = 0.01  # than a plan of a user's: by more than that, no plan may be
MODELLED_TOO_HIGH = 1.25  # times what a plan takes: one that is modelled higher is not read
PEERS = 3  # readings of plans of users
LATER_EFFORT = 0.3  # for each solve after the first: it knows more then


def choose_by_reading(
    subject: Subject,
    solver: Solver,
    budget_nbytes: int,
    *,
    least: bool = False,
    before: tuple[Reader, Sequence[Choice]] | None = None,
) -> Choice:
    """The fastest of a few candidates whose generated code is read to fit the budget.

    If none fits, a fixed ladder of lean plans decides: it does not depend on the budget, so the
    peak that it reaches is accepted when it is asked for.

    Args:
        subject: the graph.
        solver: of its problem; its time limit is for the candidates, and again for the ladder.
        budget_nbytes: of the whole step.
        least: whether, if none fits, the smallest peak that is found is the budget.
        before: what has read for another budget, and the ladder that it has read.
    """
    reader, ladder = before or (Reader(subject, budget_nbytes), ())
    reader.budget_nbytes = budget_nbytes
    found = fitting_by_reading(reader, solver)
    if found is not None:
        return found
    known = [*(ladder or lean_by_reading(reader, solver))]
    best = best_of(known, budget_nbytes)
    if best.fits or not least:
        return best
    return choose_by_reading(subject, solver, best.needed_nbytes, before=(reader, known))


def fitting_by_reading(reader: Reader, solver: Solver) -> Choice | None:
    """The fastest of a few candidates that are read to fit the reader's budget, if one does."""
    cut_off, budget_nbytes = CutOff(solver.time_limit_s), reader.budget_nbytes
    fastest = solver.fastest(time_limit_s=cut_off.left_s)
    own = _own_if_it_may_fit(reader, fastest, budget_nbytes, strict=solver.strict)
    if own is not None and own.fits:
        if own.code_us is None or reader.unplanned.own_masks_us < SLOWER * own.code_us:
            return own
        with suppress(Exception):  # what was found is not lost to a comparison
            found = _fitting(reader, solver, fastest, budget_nbytes, cut_off)
            if found is not None and found.code_us is not None:
                return found if found.code_us * (1 + SLOWER) < own.code_us else own
        return own
    if budget_nbytes < solver.problem.resident_nbytes:
        return None
    found = _fitting(reader, solver, fastest, budget_nbytes, cut_off)
    if found is None:
        return None
    return _or_a_peer(reader, found, fastest, budget_nbytes, cut_off)


def lean_by_reading(reader: Reader, solver: Solver) -> list[Choice]:
    """Lean plans, read, and torch's own partition where it may fit the reader's budget."""
    fastest = solver.fastest(time_limit_s=solver.time_limit_s)
    own = _own_if_it_may_fit(reader, fastest, reader.budget_nbytes, strict=solver.strict)
    return [*_ladder(reader, solver, fastest), *([own] if own else [])]


def _fitting(
    reader: Reader, solver: Solver, fastest: Solution, budget_nbytes: int, cut_off: CutOff
) -> Choice | None:
    """The fastest that fits of the plans that are searched for at a budget; None if none does.

    The solver is asked for a target, starting from the budget. Where a reading finds less than was
    modelled, the model is corrected; where it finds more, the target is shifted by that. A model
    that refuses the budget is asked again when the code of the plan that recomputes every layer has
    corrected it; that plan is returned if it is faster, or nothing else fits. A reading lasts as
    long as half a compile.

    The solver's time limit is for all of it: when it is over, nothing more is searched for, and
    nothing more is read once a plan fits. If the first one that was read does not, one more is
    searched for and read: what misses the budget by little is far from the leanest.
    """
    model, target = solver, budget_nbytes
    best, by_layer, loosenings, both = None, None, 0, True
    for turn in range(MOST_READINGS):
        if turn and cut_off.is_over and (best is not None or turn >= SURE_READINGS):
            break
        least_s = LATER_EFFORT * solver.time_limit_s
        limit_s = max(cut_off.left_s, least_s) if turn else solver.time_limit_s
        solution = model.solve(target, time_limit_s=limit_s, effort=LATER_EFFORT if turn else None)
        if solution.status is Status.INFEASIBLE:
            by_hand, learned = _by_layer(reader, solver, fastest)
            if model is not solver or learned is None:
                break
            by_layer, model = by_hand, learned
            continue
        of_graph = _of_graph(solution, fastest, solver.problem)
        both = both and not (turn and cut_off.is_over)
        choice = reader.read(of_graph, both=both)
        both = both and not reader.ways_alike(of_graph)
        if choice.fits and (best is None or is_faster(choice, best)):
            best = choice
        if best is not None:
            loosenings += 1
            used = best.needed_nbytes >= GOOD_USE * budget_nbytes
            if used or loosenings > LOOSENINGS or _same(solution, fastest):
                break
        learned = _learned(model, choice)
        if learned is not None:
            model, target = learned, budget_nbytes
            continue
        next_target = _shifted(target, choice, budget_nbytes, model.problem)
        if next_target == target:
            break
        target = next_target
    found = [choice for choice in (best, by_layer) if choice is not None and choice.fits]
    return fastest_of(found) if found else None


def _or_a_peer(
    reader: Reader, found: Choice, fastest: Solution, budget_nbytes: int, cut_off: CutOff
) -> Choice:
    """What users have done by hand, if that fits as compiled and is faster; else what was found.

    Where the model was right and leaves no room for faster plans, nobody looks.
    """
    problem, resident = reader.subject.lowered.problem, reader.subject.lowered.shell.resident_nbytes
    above, needed = (
        nbytes - resident
        for nbytes in (simulate(problem, found.solution.plan).peak_nbytes, found.needed_nbytes)
    )
    is_right = abs(above - needed) <= SLOWER * needed
    is_full = found.needed_nbytes >= GOOD_USE * budget_nbytes
    if cut_off.is_over or (is_right and is_full and found.solution.gap <= SLOWER):
        return found
    most_us = model_us(found) / (1 + SLOWER)
    faster = faster_peers(
        reader.subject,
        budget_nbytes,
        most_us,
        slack=MODELLED_TOO_HIGH,
        is_late=lambda: cut_off.is_over,
    )
    both = not reader.ways_alike(found.solution)
    for name, plan in faster[:PEERS]:
        if cut_off.is_over:
            break
        with suppress(Exception):  # what was found is not lost to a comparison
            peer = reader.read(with_plan(fastest, problem, plan, name), both=both)
            if peer.fits and is_faster(peer, found, by=SLOWER):
                return peer
    return found


def _by_layer(
    reader: Reader, solver: Solver, fastest: Solution
) -> tuple[Choice | None, Solver | None]:
    """The plan that recomputes every layer, and a solver of the problem that its code corrects."""
    problem = solver.problem
    plan = layer_by_layer(reader.subject)
    if plan is None:
        return None, None
    choice = reader.read(with_plan(fastest, problem, plan, BY_LAYER))
    return choice, _learned(solver, choice)


def _learned(solver: Solver, choice: Choice) -> Solver | None:
    """A solver of the problem as a reading corrects it; None if that changes next to nothing."""
    problem = corrected(solver.problem, choice.solution.plan, choice.needed_nbytes)
    return None if problem is None else _like(solver, problem)


def _like(solver: Solver, problem: Problem) -> Solver:
    return Solver(
        problem, time_limit_s=solver.time_limit_s, strict=solver.strict, good_enough=ALIKE
    )


def _of_graph(solution: Solution, fastest: Solution, problem: Problem) -> Solution:
    """A solution of a corrected problem as one of the graph's own, of which its plan is as well."""
    timeline = simulate(problem, solution.plan)
    return replace(solution, timeline=timeline, floor_nbytes=fastest.floor_nbytes)


def _own_if_it_may_fit(
    reader: Reader, fastest: Solution, budget_nbytes: int, *, strict: bool
) -> Choice | None:
    """Torch's own partition: with room for it, nothing beats it but what writes no masks.

    Where what it saves alone is above the budget, no code is generated. It knows nothing of what
    the user asked for.
    """
    own = None if reader.subject.constraints.asked else reader.unplanned.own
    if own is None or own.least_nbytes > budget_nbytes:
        return None
    return reader.read_own(fastest, strict=strict)


def _ladder(reader: Reader, solver: Solver, fastest: Solution) -> list[Choice]:
    """Lean plans, read: the smallest modelled peak need not be the smallest real one.

    What a refusal without a search rests on is among them. Nothing else that was read counts, but
    for torch's own partition: what a refusal names has to be found again, whatever was asked for
    before.
    """
    cut_off = CutOff(solver.time_limit_s)
    problem = solver.problem
    at_once = leanest_at_once(
        reader.subject,
        lambda plan, name: leanest(reader.ways(with_plan(fastest, problem, plan, name))),
    )
    by_layer, learned = _by_layer(reader, solver, fastest)
    choices = [] if by_layer is None else reader.ways(by_layer.solution)
    ladder = learned or _like(solver, problem)
    # All are searched for before the first is read: readings may last, and what is named has to be
    # found again where they last longer.
    for solution in list(_lean_plans(ladder, fastest, cut_off)):
        if cut_off.is_over and any(choice.fits for choice in choices):
            break
        choices += reader.ways(_of_graph(solution, fastest, problem))
    return [*reader.ways(at_once.solution), *choices]


def best_of(ladder: Sequence[Choice], budget_nbytes: int) -> Choice:
    """The fastest that fits; if none does, the smallest real peak."""
    ladder = [replace(c, fits=c.needed_nbytes <= budget_nbytes) for c in ladder]
    fitting = [choice for choice in ladder if choice.fits]
    best = fastest_of(fitting) if fitting else leanest(ladder)
    return replace(best, solution=searched_by(best.solution, [c.solution for c in ladder]))


def _lean_plans(solver: Solver, fastest: Solution, cut_off: CutOff) -> Iterator[Solution]:
    """The smallest modelled peak, a ladder above it, and the other end."""
    smallest = solver.smallest_peak()
    yield smallest
    resident = solver.problem.resident_nbytes
    above = smallest.timeline.peak_nbytes - resident
    for times in LEAN_TARGETS[1:]:
        target = resident + int(times * above)
        yield solver.solve(target, time_limit_s=cut_off.left_s, effort=LATER_EFFORT)
    yield fastest


def _shifted(target: int, choice: Choice, budget_nbytes: int, problem: Problem) -> int:
    """The next target for the model: moved by what the last reading missed the budget by.

    Below it by more: what the code takes besides does not shrink with the plan, so that a target
    that only just fits by the last reading is missed again.
    """
    modelled = simulate(problem, choice.solution.plan).peak_nbytes
    resident = problem.resident_nbytes
    scale = (modelled - resident) / max(1, choice.needed_nbytes - resident)
    aimed = resident + int((budget_nbytes - resident) * scale)
    if choice.fits:
        return max(aimed, target + 1)
    missed = choice.needed_nbytes - budget_nbytes
    return min(aimed - 2 * missed, modelled - 1, target - 1)


def _same(one: Solution, other: Solution) -> bool:
    return one.plan == other.plan
