"""A step planned anew, for what the steps so far have shown of it.

Enters: `Steps` that have run, and their graphs as Dynamo handed them over. Leaves: parts with other
plans, up to two for each graph, under which the steps run from now on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace

from autoremat_solver.problem import ProblemError

from autoremat import _torch
from autoremat.ask.policy import parse_policy
from autoremat.memory.residents import Resident
from autoremat.planning.allotting import Allotted, graph_of_plan
from autoremat.planning.asked import policy_plan, store
from autoremat.planning.choice import Choice, as_chosen
from autoremat.planning.curve import Curve
from autoremat.planning.part import Part, Planned
from autoremat.planning.pipeline import choose
from autoremat.planning.ran import Ran
from autoremat.planning.ranges import covered
from autoremat.planning.retained import choose_beside_kept
from autoremat.planning.step import Step
from autoremat.planning.unsearched import choose_fixed
from autoremat.problem.subject import Subject
from autoremat.session.afterwards import with_later_baseline
from autoremat.session.alike import require_alike
from autoremat.session.replans import WORTH_A_PLAN
from autoremat.session.reports import explained
from autoremat.session.steps import Steps
from autoremat.session.under_autocast import narrowed_by

# At a division of the budget: generated code, or a backward that keeps its graph, may take more.
TRIES, FEW_TRIES = 6, 3
SPARED = 0.005  # of a budget: what only the allocator shows may grow by as much
BY_SEGMENTS = ("sqrt", "every-layer", "every-2")  # names of policies

_ChooseFor = Callable[[Steps, Subject, int], Choice]


def plan_anew(steps: Steps, graphs: Mapping[str, _torch.DynamoGraph]) -> dict[str, list[Part]]:
    """Plan all graphs of a step at once.

    Args:
        steps: what is known of them; their graphs have the new plans afterwards.
        graphs: of the step, by name.

    Returns:
        The plans of each graph, by its name: one, or a lean and a rich one; those of now, and for
        parts of its ranges, where these fit and what was found is no better.

    Raises:
        SteeringError: if another rank's communicate otherwise.
    """
    known = steps.graphs, steps.graphs.room, steps.graphs.repeats
    before = [dict(vars(one)) for one in known]  # planning replaces what they hold
    is_optional, is_for_host = steps.replans.is_optional, steps.replans.is_for_host
    may_stay = (is_optional or is_for_host) and _torch.job_store() is None  # ranks stay alike
    time_us = _time_us(steps.graphs)
    planned = planned_together(steps, graphs)
    require_alike(planned)
    is_above = steps.peak_to_come_nbytes > steps.budget_nbytes
    is_no_better = is_optional and _time_us(steps.graphs) >= time_us
    if not (may_stay and (is_above or is_no_better)):
        return planned
    for one, values in zip(known, before, strict=True):
        vars(one).update(values)
    return {name: _all_of(steps.graphs, name) for name in planned}


def _all_of(graphs: Step, name: str) -> list[Part]:
    """The plans of a graph, those for parts of its ranges included."""
    found = (part for plan, part in graphs.parts.items() if graph_of_plan(plan) == name)
    return [one for part in found for one in (part, *(part.smaller or ()))]


def _time_us(graphs: Step) -> float:
    """Of the longest step, by its plans."""
    return sum(part.choice.solution.timeline.time_us for part in graphs.longest_as_planned)


def planned_together(
    steps: Steps, graphs: Mapping[str, _torch.DynamoGraph]
) -> dict[str, list[Part]]:
    """The same, whatever other ranks do: for plans by which no step is going to run."""
    is_least, around = steps.options.budget.is_least, steps.surroundings.now
    target_nbytes = 0 if is_least else steps.budget_nbytes
    setting, is_nested = steps.options.setting, steps.is_nested
    planned: dict[str, list[Part]] = {}
    if not is_least:
        steps.graphs.room.leave(steps.budget_nbytes, around)
    for order in steps.graphs.orders:
        step = functools.partial(
            steps.graphs.allotted, order, around=around, setting=setting, is_nested=is_nested
        )
        planned |= _planned_part(steps, graphs, order, step, target_nbytes, set(planned))
    return planned


def count_optimizer(steps: Steps, found: Resident) -> None:
    """State of an optimizer that is known by now: it is resident, and beside nothing.

    Args:
        steps: which it is of.
        found: what they hold whatever the plan, as it is now.
    """
    more_nbytes = found.parts.optimizer_nbytes - steps.resident.parts.optimizer_nbytes
    if more_nbytes <= 0:
        return
    steps.resident = steps.resident.with_optimizer(found)
    for name, part in steps.graphs.parts.items():
        steps.graphs.parts[name] = part.with_optimizer(found)
    steps.surroundings.grown_nbytes = max(0, steps.surroundings.grown_nbytes - more_nbytes)


def note_allocated(steps: Steps, peak_nbytes: int) -> None:
    """So much was allocated at most in a step: what nothing else shows is planned for.

    Once two steps have shown it. Where processes share a job each would plan for something else,
    and none does.

    Args:
        steps: of which it is one.
        peak_nbytes: as the allocator counts it.
    """
    known_nbytes, budget_nbytes = steps.peak_nbytes, steps.budget_nbytes
    if steps.options.budget.is_least or not steps.is_planned:
        return
    is_above = peak_nbytes > budget_nbytes
    excess_nbytes = max(0, peak_nbytes - known_nbytes) if is_above else 0
    is_planned_for = _torch.job_store() is None and steps.replans.are_open
    margin_nbytes = int(SPARED * budget_nbytes)
    is_again = is_planned_for and steps.surroundings.note_unseen(excess_nbytes, margin_nbytes)
    if not is_above:
        return
    if is_planned_for and excess_nbytes and not is_again:
        steps.measured.again()
    is_coming = steps.replans.is_coming if is_again else bool(excess_nbytes)
    steps.told.peak(
        peak_nbytes,
        budget_nbytes,
        predicted_nbytes=known_nbytes if is_coming else max(known_nbytes, steps.peak_nbytes),
        is_final=True,
        is_planned_anew=is_planned_for and is_coming,
        is_leanest=steps.replans.are_exhausted,
        accumulates=steps.accumulates,
    )


def count_unseen(steps: Steps) -> None:
    """What only the allocator's own peaks have shown: it is resident, and beside nothing.

    Args:
        steps: in which it was found.
    """
    more_nbytes = steps.surroundings.unseen_nbytes
    if not more_nbytes:
        return
    # One that was recalled may have to be made again, which may fail.
    parts = {name: part.with_unseen(more_nbytes) for name, part in steps.graphs.parts.items()}
    steps.graphs.parts.update(parts)
    steps.resident = steps.resident.with_unseen(more_nbytes)
    steps.audit.unseen[steps.device] = steps.audit.unseen.get(steps.device, 0) + more_nbytes
    steps.surroundings.unseen_nbytes = 0


def _planned_part(
    steps: Steps,
    graphs: Mapping[str, _torch.DynamoGraph],
    order: Sequence[Ran],
    allotted_of: Callable[[int], list[Allotted]],
    target_nbytes: int,
    done: Set[str],
    *,
    is_again: bool = False,
) -> dict[str, list[Part]]:
    """The same of a part of a step, but for what is done; of all of it if that leaves no room."""
    around, first_target_nbytes = steps.surroundings.now, target_nbytes
    for number in range(1, 1 + TRIES):
        found = [a for a in allotted_of(target_nbytes) if is_again or a.graph not in done]
        parts = {allotted.plan: _planned_within(steps, graphs, allotted) for allotted in found}
        steps.graphs.take(order, parts, _rich_from(found), done)
        above_nbytes = steps.graphs.peak_nbytes(around) - steps.budget_nbytes
        if above_nbytes <= 0 or any(a.budget_nbytes > target_nbytes for a in found):
            break
        target_nbytes -= number * above_nbytes  # what a leaner plan takes more, it may take again
    if above_nbytes > 0 and steps.graphs.kept & {a.graph for a in found}:
        parts = _keeping_less(steps, graphs, order, found, parts, first_target_nbytes, done)
    if above_nbytes > 0 and not is_again and done & {ran.graph for ran in order}:
        return _planned_part(
            *(steps, graphs, order, allotted_of, first_target_nbytes, done), is_again=True
        )
    names = dict.fromkeys(allotted.graph for allotted in found)
    return {name: [parts[a.plan] for a in found if a.graph == name] for name in names}


def _keeping_less(
    steps: Steps,
    graphs: Mapping[str, _torch.DynamoGraph],
    order: Sequence[Ran],
    found: Sequence[Allotted],
    parts: Mapping[str, Part],
    target_nbytes: int,
    done: Set[str],
) -> dict[str, Part]:
    """The best of these plans and leaner ones, where a backward keeps its graph.

    What crosses to such a backward is there in all of it, which the usual search does not know: the
    leanest plan that it finds may keep more than one that saves little and makes one segment after
    the other. A search beside what such a plan saves does know: it gets all of the target.

    Args:
        steps: as they are known.
        graphs: of the step, by name.
        order: the part of it that is planned.
        found: what each plan gets.
        parts: the plans for that.
        target_nbytes: of the whole step.
        done: graphs that are planned already.
    """
    around, kept = steps.surroundings.now, steps.graphs.kept
    first_runs = _rich_from(found)

    def above_and_time(parts: Mapping[str, Part]) -> tuple[int, float]:
        steps.graphs.take(order, parts, first_runs, done)
        above_nbytes = steps.graphs.peak_nbytes(around) - steps.budget_nbytes
        return max(0, above_nbytes), sum(p.choice.solution.timeline.time_us for p in parts.values())

    def planned(choose_for: _ChooseFor, allotted: Sequence[Allotted]) -> None:
        with suppress(ProblemError):  # some values may neither be saved nor made again
            new = {
                a.plan: _planned(steps, graphs, a, choose_for) if a.graph in kept else parts[a.plan]
                for a in allotted
            }
            known.append((above_and_time(new), new))

    known = [(above_and_time(parts), dict(parts))]
    by_segments = []
    for name in BY_SEGMENTS:
        before = len(known)
        planned(functools.partial(_by_policy, name), found)
        by_segments += [(found_by, name) for found_by, _ in known[before:]]
    whole = [replace(a, budget_nbytes=target_nbytes) for a in found]
    for _, name in sorted(by_segments):
        planned(functools.partial(_beside_kept, name), whole)
        if known[-1][0][0] == 0:
            break
    best = min(known, key=lambda each: each[0])[1]
    steps.graphs.take(order, best, first_runs, done)
    return best


def _rich_from(found: Sequence[Allotted]) -> dict[str, int]:
    """By graph whose last runs have a plan of their own, the first of them."""
    return {a.graph: a.first_run for a in found if a.first_run is not None}


def _by_policy(name: str, steps: Steps, subject: Subject, budget_nbytes: int) -> Choice:
    plan, method = policy_plan(subject, parse_policy(name))
    reads = steps.options.setting.reads_inductor
    return choose_fixed(subject, plan, method, budget_nbytes, reads=reads)


def _beside_kept(name: str, steps: Steps, subject: Subject, budget_nbytes: int) -> Choice:
    return choose_beside_kept(subject, parse_policy(name), budget_nbytes, steps.options.setting)


def _searched(steps: Steps, subject: Subject, budget_nbytes: int) -> Choice:
    return choose(subject, budget_nbytes, steps.options.setting, number=1)


def _planned_within(
    steps: Steps, graphs: Mapping[str, _torch.DynamoGraph], allotted: Allotted
) -> Part:
    """A plan for what a graph gets: made as if what passes stayed, where its forward needs that."""
    is_least = steps.options.budget.is_least  # which nobody is told to be above
    if allotted.graph in steps.replans.with_gone or (is_least and allotted.held < 1):
        with_gone = _planned_with_gone(steps, graphs, allotted)
        if with_gone is not None:
            return with_gone
    part = _planned(steps, graphs, allotted)
    is_above = part.peak_nbytes(allotted.found) > allotted.budget_nbytes
    if not (is_above and allotted.found.passing_nbytes):
        return part
    other = _planned(steps, graphs, replace(allotted, found=allotted.found.throughout))
    return min(part, other, key=lambda each: each.peak_nbytes(allotted.found))


def _planned_with_gone(
    steps: Steps, graphs: Mapping[str, _torch.DynamoGraph], allotted: Allotted
) -> Part | None:
    """A plan that takes what nobody holds of the graph's results; None if it cannot.

    Its problem holds them all to the end: so it is asked for beside that much more.
    """
    before = steps.graphs.parts[allotted.graph].as_held(allotted.held)
    more_nbytes = before.gone_nbytes
    for number in range(1, 1 + FEW_TRIES):
        if more_nbytes <= WORTH_A_PLAN * (allotted.budget_nbytes - before.resident_nbytes):
            break
        budget_nbytes = allotted.budget_nbytes + more_nbytes
        part = _planned(steps, graphs, replace(allotted, budget_nbytes=budget_nbytes))
        above_nbytes = part.as_held(allotted.held).peak_nbytes(allotted.found)
        above_nbytes -= allotted.budget_nbytes
        if above_nbytes <= 0:
            # Resumed elsewhere, it runs by what fits whoever holds its results.
            whole = replace(part.planned.whole, stored=before.planned.whole.stored)
            return replace(part, planned=whole, counted_on=allotted.held)
        more_nbytes -= number * above_nbytes
    return None


def _planned(
    steps: Steps,
    graphs: Mapping[str, _torch.DynamoGraph],
    allotted: Allotted,
    choose_for: _ChooseFor = _searched,
) -> Part:
    part, around = steps.graphs.parts[allotted.graph], steps.surroundings.now
    subject = allotted.place(part.subject, around)
    with graphs[allotted.graph].resumed():  # generated code may be read
        choice = choose_for(steps, subject, allotted.budget_nbytes)
    planned = Planned(
        part.subject,
        with_later_baseline(choice, lambda: graphs[allotted.graph], steps.options),
        counted=allotted.found.stated,
        explain=functools.partial(
            explained, allotted.plan, narrowed_by(graphs[allotted.graph], steps.options)
        ),
        stored=store(part.subject, choice),
        curve=Curve(),
    )
    known = part.covered
    if known is not None:
        known = covered(as_chosen(subject, choice), choice.solution.plan, known.names)
    return replace(
        part,
        planned=planned,
        growth=1.0,
        covered=known,
        smaller=None,
        counted_on=1.0,
        _reports={},
    )
