"""The first plan of a graph, beside what is known of its step so far.

Enters: a stated graph, and the `Steps` that it is one of. Leaves: a `Part` of the step. Guarantees:
a graph that may run many times, or that others come after, keeps the least until a step has shown
all of its graphs; what does not fit is refused where nothing of the step has run yet.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from autoremat_solver import simulate
from autoremat_solver.policies import recompute_all
from torch import nn

from autoremat import _torch
from autoremat.ask.options import Offline, Options, Setting
from autoremat.errors import InfeasibleBudget, OverBudget
from autoremat.explain.advice import Narrowed
from autoremat.explain.graph_report import facts_of_refusal
from autoremat.graph.collectives import run_once_collectives
from autoremat.memory.residents import with_others
from autoremat.memory.storage_sizes import storage_sizes
from autoremat.planning.asked import store
from autoremat.planning.choice import Choice, as_chosen
from autoremat.planning.curve import Curve, curve_of
from autoremat.planning.figures import may_repeat, shared_out, trained_nbytes
from autoremat.planning.nesting import Beside
from autoremat.planning.part import Part, Planned
from autoremat.planning.pipeline import choose, search
from autoremat.planning.ranges import Covered, covered, largest_fitting
from autoremat.planning.simulated import plans_at_once, simulated_peaks
from autoremat.planning.sizes import GUARDED_COMPILES, MANY_COMPILES, keep_to_sizes, room_to_grow
from autoremat.planning.unsearched import choose_fixed, choose_without_search
from autoremat.planning.ways import crossing_nbytes
from autoremat.problem.lower import as_written
from autoremat.problem.subject import Subject
from autoremat.session.afterwards import with_later_baseline
from autoremat.session.alike import require_alike
from autoremat.session.reports import explained
from autoremat.session.steps import Steps
from autoremat.session.under_autocast import narrowed_by

_CAUTIOUS = "lean until a step has shown how often it runs"  # the method of a choice
_TRIES = 4  # to leave room for sizes at which a plan is higher than at the largest
_MANY_RUNS = 128  # of one graph in a step: more than most have layers


def first_part(
    name: str,
    subject: Subject,
    between_nbytes: int,
    steps: Steps,
    dynamo: Mapping[str, _torch.DynamoGraph],
    at_hand: _torch.DynamoGraph,
    *,
    may_refuse: bool,
    names: Mapping[Any, str],
) -> Part:
    """A graph of the step with the plan that it gets beside the others.

    Args:
        name: of the graph.
        subject: the graph.
        between_nbytes: what the code before it holds that no plan of an earlier graph counts.
        steps: those that it is part of.
        dynamo: their graphs, as Dynamo handed them over; this one may be there later.
        at_hand: this one.
        may_refuse: whether a budget that cannot be met is an error, of a first graph.
        names: of symbols that were given a range, as users know them.

    Raises:
        InfeasibleBudget: if it is, and no plan of a first graph fits.
    """
    options, budget_nbytes = steps.options, steps.budget_nbytes
    setting, is_least = options.setting, options.budget.is_least
    number = len(steps.graphs.earlier(name))
    refuses = may_refuse and number == 0 and not is_least
    placed, found = steps.placed(subject, name)
    choice = _until_known(name, placed, steps, number)
    if is_least and choice is not None and not choice.fits:
        # The fastest that takes no more.
        budget_nbytes, choice = max(budget_nbytes, choice.needed_nbytes), None
    choice = choice or choose(
        placed, budget_nbytes, setting, number=number, refuses=refuses, least=is_least
    )
    if is_least and choice.fits:
        budget_nbytes = max(budget_nbytes, choice.needed_nbytes)
    choice, known = with_room(choice, placed, budget_nbytes, steps, names)
    choice = with_later_baseline(choice, lambda: dynamo.get(name), options)
    narrowed = narrowed_by(at_hand, options)
    growth = _keep_to_sizes(placed, choice, budget_nbytes, steps)
    offline = steps.offline or Offline()
    planned = Planned(
        subject,
        choice,
        counted=found,
        explain=functools.partial(explained, name, narrowed),
        stored=store(subject, choice),
        curve=curve_of(subject, choice, offline.curve_points, offline.curve_limit_s),
    )
    part = Part(planned, between_nbytes, steps.resident, growth, known)
    if not choice.fits and refuses:
        # What goes on behind it may let go of its results, which the step is going to show.
        least = part.as_held(0.0) if at_hand.is_broken_off else part
        if least.peak_nbytes(found) > budget_nbytes:
            raise _refusal(placed, choice, budget_nbytes, steps, names, narrowed)
    require_alike({name: [part]})
    return part


def with_room(
    choice: Choice,
    placed: Subject,
    budget_nbytes: int,
    steps: Steps,
    names: Mapping[Any, str],
) -> tuple[Choice, Covered | None]:
    """A choice, or one that leaves room for what no choice counts, and which sizes it covers.

    Args:
        choice: of a graph.
        placed: the graph beside the others of its step.
        budget_nbytes: of the step.
        steps: that it is part of.
        names: as of `first_part`.
    """
    setting, gathers_nbytes = steps.options.setting, steps.resident.traffic.forward_nbytes
    if gathers_nbytes and choice.fits and not setting.steering.choice:
        choice = _beside_gathered(choice, gathers_nbytes, placed, budget_nbytes, setting)
    if not placed.sizes:
        return choice, None
    known = covered(as_chosen(placed, choice), choice.solution.plan, names)
    if known.above_nbytes and choice.fits and not setting.steering.choice:
        return _lower(choice, known, placed, budget_nbytes, setting, names)
    return choice, known


def _lower(
    choice: Choice,
    known: Covered,
    placed: Subject,
    budget_nbytes: int,
    setting: Setting,
    names: Mapping[Any, str],
) -> tuple[Choice, Covered]:
    """A plan that leaves room for smaller sizes at which it is higher, if one is found."""
    target_nbytes = budget_nbytes
    for _ in range(_TRIES):
        above_nbytes = choice.needed_nbytes + known.above_nbytes - budget_nbytes
        if above_nbytes <= 0:
            break
        target_nbytes -= above_nbytes
        lower = choose(placed, target_nbytes, setting)
        if not lower.fits:
            break
        choice = lower
        known = covered(as_chosen(placed, choice), choice.solution.plan, names)
    return choice, known


def _beside_gathered(
    choice: Choice, gathers_nbytes: int, placed: Subject, budget_nbytes: int, setting: Setting
) -> Choice:
    """A plan that leaves room for what is gathered into during its forward, if one is found."""
    problem, plan = placed.lowered.problem, choice.solution.plan
    forward_nbytes, _ = shared_out(problem, plan, choice.peak_nbytes, Beside())
    if problem.resident_nbytes + forward_nbytes + gathers_nbytes <= budget_nbytes:
        return choice
    lower = choose(placed, budget_nbytes - gathers_nbytes, setting)
    return lower if lower.fits else choice


def planned_alone(
    name: str,
    subject: Subject,
    budget_nbytes: int,
    options: Options,
    graph: _torch.DynamoGraph,
    refuses: bool,
) -> Planned:
    """What `first_part` makes of a step's first graph, where nothing is known to be beside it.

    Args:
        name: of the graph.
        subject: the graph.
        budget_nbytes: of the step.
        options: the user's.
        graph: as Dynamo handed it over.
        refuses: whether a budget that cannot be met is an error.
    """
    is_least = options.budget.is_least
    refuses = refuses and not is_least
    choice = choose(subject, budget_nbytes, options.setting, refuses=refuses, least=is_least)
    choice = with_later_baseline(choice, lambda: graph, options)
    explain = functools.partial(explained, name, narrowed_by(graph, options))
    stored = store(subject, choice)
    return Planned(subject, choice, Beside(), explain, stored, Curve())


def _until_known(name: str, placed: Subject, steps: Steps, number: int) -> Choice | None:
    """What a graph runs by until its step is planned as a whole.

    None where that may never be, or where the graph can keep everything: it is searched for then.
    """
    setting, is_least = steps.options.setting, steps.options.budget.is_least
    if setting.steering.choice or steps.offline:
        return None
    problem, to_come = placed.lowered.problem, _to_come(name, placed, steps)
    richest = as_written(problem)
    most_nbytes = simulate(problem, richest).peak_nbytes
    if to_come:
        most_nbytes += to_come * crossing_nbytes(problem, richest)
    if most_nbytes <= steps.budget_nbytes:
        return None
    choice = _lean(placed, steps) if to_come else None
    if choice is None or not (choice.fits or is_least):
        choice = _passing(placed, steps, number)
    if choice is not None:
        steps.graphs.provisional.add(name)
    return choice


def _lean(placed: Subject, steps: Steps) -> Choice:
    """For a graph that others come after: what keeps the least, or peaks the lowest if that fits.

    To keep the least takes as much in the backward as to keep everything: all is made again.
    """
    budget_nbytes, reads = steps.budget_nbytes, steps.options.setting.reads_inductor
    plan = recompute_all(placed.lowered.problem)
    least = choose_fixed(placed, plan, _CAUTIOUS, budget_nbytes, reads=reads)
    if least.fits or steps.options.budget.is_least or not _fits_at_once(placed, budget_nbytes):
        return least
    return choose_without_search(placed, budget_nbytes, reads=reads)


def _passing(placed: Subject, steps: Steps, number: int) -> Choice | None:
    """For a later graph that does not fit beside those before it, unless it is planned for good."""
    setting, budget_nbytes = steps.options.setting, steps.budget_nbytes
    is_settled = steps.replans.count or steps.options.budget.is_least
    is_given = steps.replans.are_ruled_out or setting.steering.known is not None
    if not number or is_settled or is_given:
        return None
    is_certain = bool(steps.graphs.provisional)  # that the step is planned anew
    if not is_certain and _fits_at_once(placed, budget_nbytes):
        return None
    choice = choose_without_search(placed, budget_nbytes, reads=setting.reads_inductor)
    if not choice.fits:
        choice = choose(placed, budget_nbytes, setting, number=number, is_passing=True)
    return choice if is_certain or not choice.fits else None


def _fits_at_once(placed: Subject, budget_nbytes: int) -> bool:
    """Whether a plan that needs no search fits, as the simulator sees it."""
    lowered = placed.lowered
    plans = plans_at_once(lowered.problem).values()
    return any(simulated_peaks(lowered, plan).needed_nbytes <= budget_nbytes for plan in plans)


def _to_come(name: str, placed: Subject, steps: Steps) -> int:
    """About how many graphs like this one its step may run after it, as far as is known.

    DistributedDataParallel parts a graph into one for each of its buckets: what the other graphs
    train says how many there are. A block that runs again and again trains nothing more.
    """
    many = _MANY_RUNS if may_repeat(placed.joint) else 0
    replica, device = _torch.active_replica(), placed.device
    own_nbytes = trained_nbytes(placed)
    if replica is None or not own_nbytes:
        return many
    of_module = {id(m): _trainable_nbytes(m, device) for m, _ in _torch.module_calls()}
    is_block = own_nbytes in (of_module.get(id(part)) for part in replica.modules())
    before_nbytes = sum(part.figures.gradients_nbytes for part in steps.graphs.earlier(name))
    left_nbytes = _trainable_nbytes(replica, device) - before_nbytes - own_nbytes
    others = max(0, math.ceil(left_nbytes / own_nbytes))
    return max(others, many) if is_block else others


def _trainable_nbytes(module: nn.Module, device: torch.device) -> int:
    trained = [p for p in module.parameters() if p.requires_grad]
    return sum(storage_sizes(trained, device).values())


def _keep_to_sizes(placed: Subject, choice: Choice, budget_nbytes: int, steps: Steps) -> float:
    """By how much the graph's sizes may grow before another plan is made."""
    # What other runs of a step hold grows as well: by how much, no graph of it knows.
    is_alone = steps.graphs.most_runs < 2 and not steps.graphs.runs
    growth = room_to_grow(placed, choice, budget_nbytes) if choice.fits and is_alone else 1.0
    # Of what `optimize` has compiled, Dynamo may compile much more often.
    often = MANY_COMPILES if steps.is_told else GUARDED_COMPILES
    if _torch.compile_number() < often:
        keep_to_sizes(placed, growth)
    return growth


def _refusal(
    subject: Subject,
    choice: Choice,
    budget_nbytes: int,
    steps: Steps,
    names: Mapping[Any, str],
    narrowed: Narrowed,
) -> InfeasibleBudget:
    """Of a first graph that does not fit; what comes later runs as lean as it can."""
    more_nbytes = subject.lowered.problem.resident_nbytes - steps.resident.nbytes
    resident = replace(steps.resident, accumulates=steps.accumulates)
    facts = facts_of_refusal(subject, choice, budget_nbytes, resident, narrowed)
    facts["resident"] = with_others(steps.resident.parts, more_nbytes)
    if subject.sizes:
        chosen, plan = as_chosen(subject, choice), choice.solution.plan
        largest, facts["is_each_enough"] = largest_fitting(chosen, plan, budget_nbytes, names)
        facts["largest_sizes"] = tuple(largest)
    setting = steps.options.setting
    asked = setting.steering.choice
    if asked:
        optimal = search(subject, budget_nbytes, setting, refuses=True)
        return OverBudget(**facts, choice=asked, optimal_peak_nbytes=optimal.peak_nbytes)
    error = InfeasibleBudget(**facts)
    if subject.constraints.asked:
        error.add_note("This respects save= and recompute=: without them, less may be enough.")
    collectives = run_once_collectives(subject.joint, subject.constraints.run_once)
    if collectives:
        error.add_note(
            f"What {', '.join(collectives)} make is kept, since collectives run once. Checkpoints "
            f'run them again; a plan may with repeatable="{collectives[0]}".'
        )
    return error
