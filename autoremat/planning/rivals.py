"""Plans that fit as well as the chosen one, and may be faster than the model knows.

Enters: a stated graph, its chosen plan and the budget. Leaves: other choices. Guarantees: each
fits, by the meter that the chosen one was measured with.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from autoremat_solver import Plan, Solver
from autoremat_solver.plan import Status

from autoremat.ask.options import Setting
from autoremat.planning.choice import Choice
from autoremat.planning.peers import faster_peers
from autoremat.planning.read import ALIKE, LATER_EFFORT, MODELLED_TOO_HIGH
from autoremat.planning.reader import Reader, is_faster
from autoremat.planning.unsearched import choose_fixed
from autoremat.problem.subject import Subject

LEANER = 0.85  # of what the chosen plan takes: less to move may be worth more recompute
FORETOLD = 0.1  # a way that is foretold to be slower by more is not tried; at all, if alone
_WAYS = {True: ", in the plan's order", False: ", made where read"}  # what they are called
MOST_TRIED = 4  # plans, each read, for as many rivals as there are to be


def rivals(
    subject: Subject, budget_nbytes: int, setting: Setting, chosen: Choice, most: int
) -> list[Choice]:
    """Up to so many others that fit.

    First the chosen plan written out in the other way, where there is one and it matters; then a
    leaner plan, and those of users, the fastest first.

    Args:
        subject: the graph.
        budget_nbytes: that they are to fit.
        setting: how the graph is planned.
        chosen: its plan.
        most: how many.
    """
    reads = setting.reads_inductor
    other = _other_way(subject, budget_nbytes, chosen, most) if reads else []
    plans = _plans(subject, budget_nbytes, setting, chosen)
    return list(itertools.islice(itertools.chain(other, plans), most))


def _plans(
    subject: Subject, budget_nbytes: int, setting: Setting, chosen: Choice
) -> Iterator[Choice]:
    reads = setting.reads_inductor
    slack = MODELLED_TOO_HIGH if reads else 1.0
    plans = [
        *_leaner(subject, setting, chosen),
        *faster_peers(subject, budget_nbytes, math.inf, slack=slack),
    ]
    for name, plan in [one for one in plans if one[1] != chosen.solution.plan][:MOST_TRIED]:
        with suppress(Exception):  # one that cannot be compiled is no rival
            choice = choose_fixed(subject, plan, name, budget_nbytes, reads=reads)
            if choice.fits:
                yield choice


def _other_way(subject: Subject, budget_nbytes: int, chosen: Choice, most: int) -> list[Choice]:
    """The chosen plan with its loops in the other order, if that fits and may be faster."""
    if chosen.torchs is not None:
        return []
    with suppress(Exception):  # one that cannot be compiled is no rival
        reader = Reader(subject, budget_nbytes)
        ways = {way.in_order: way for way in reader.ways(chosen.solution)}
        if len(ways) < 2 or reader.ways_alike(chosen.solution):
            return []
        own, other = ways[chosen.in_order], ways[not chosen.in_order]
        if other.fits and not is_faster(own, other, by=FORETOLD if most > 1 else 0.0):
            name = chosen.method.removesuffix(_WAYS[True]).removesuffix(_WAYS[False])
            return [replace(other, method=name + _WAYS[other.in_order])]
    return []


def _leaner(subject: Subject, setting: Setting, chosen: Choice) -> list[tuple[str, Plan]]:
    """What the solver finds for a smaller budget."""
    resident_nbytes = subject.lowered.problem.resident_nbytes
    above_nbytes = chosen.solution.timeline.peak_nbytes - resident_nbytes
    limit_s = setting.time_limit_s
    solver = Solver(
        subject.lowered.problem, time_limit_s=limit_s, effort=LATER_EFFORT, good_enough=ALIKE
    )
    solution = solver.solve(resident_nbytes + int(LEANER * above_nbytes))
    if solution.status is Status.INFEASIBLE:
        return []
    return [(f"{solution.method}, leaner", solution.plan)]
