"""A budget of what CUDA's allocator reserves, by a few budgets of what is allocated.

Enters: a limit in bytes, an `OfflineStep`. Leaves: the plan that makes the best use of it.
Guarantees: what is returned was emulated to reserve no more than the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoremat.ask.budget import Budget
from autoremat.ask.options import Options
from autoremat.errors import InfeasibleBudget, OverReserved
from autoremat.offline.step import OfflineStep, Planned, planned
from autoremat.reporting import LEFT_OUT, WOULD_WAIT, Fact, Report
from autoremat.reserved.search import Tried, largest_within
from autoremat.units import format_nbytes


def within_reserved(limit_nbytes: int, options: Options, step: OfflineStep) -> Planned:
    """The plan that makes the best use of a limit of what is reserved, of a few that are tried.

    Raises:
        OverReserved: if no plan that was tried is within it.
        InfeasibleBudget: if no plan's allocated peak is.
        ValueError: if nobody knows what the step reserves.
    """
    alone = replace(step, offline=replace(step.offline, curve_points=0))  # one curve is enough
    made: dict[int, Planned] = {}
    refused: list[InfeasibleBudget] = []

    def smallest(budget_nbytes: int) -> int | None:
        try:
            made[budget_nbytes] = planned(_under(budget_nbytes, options), alone)
        except InfeasibleBudget as error:
            refused.append(error)
            return error.smallest_peak_nbytes
        return None

    def tried_at(budget_nbytes: int) -> Tried[Planned]:
        one = made[budget_nbytes]
        allocated_nbytes = one.report.predicted_peak_nbytes
        return Tried(budget_nbytes, allocated_nbytes, _reserved_nbytes(one.report), one)

    best, tried = largest_within(limit_nbytes, tried_at, smallest)
    if best is None:
        raise _over_reserved(limit_nbytes, tried) if tried else _infeasible(refused[0])
    report = best.made.report
    if step.offline.curve_points:
        with_curve = planned(_under(best.budget_nbytes, options), step).report
        more = (fact for fact in with_curve.facts if fact.name in (LEFT_OUT, WOULD_WAIT))
        report = replace(report, curve=with_curve.curve, facts=(*report.facts, *more))
    return replace(
        best.made, report=_as_asked(report, limit_nbytes, best.budget_nbytes, len(tried))
    )


def _under(budget_nbytes: int, options: Options) -> Options:
    """The same for a budget of what is allocated."""
    return replace(options, budget=Budget(budget_nbytes, given=budget_nbytes))


def _reserved_nbytes(report: Report) -> int:
    """Peak of what the step reserves.

    Raises:
        ValueError: if a part of it runs without a plan.
    """
    if report.reserved is None:
        raise ValueError(
            "What the step reserves is not known, as nobody knows what parts of it without a plan "
            f"allocate: {'; '.join(map(str, report.fallbacks))} Give a budget of what is allocated."
        )
    return report.reserved.peak_nbytes


def _as_asked(report: Report, limit_nbytes: int, budget_nbytes: int, plans: int) -> Report:
    """The report beside the budget that the user gave."""
    text = (
        f"a budget of {format_nbytes(budget_nbytes)} of what is allocated: of {plans} that were "
        f"tried, it makes the best use of {format_nbytes(limit_nbytes)} reserved"
    )
    reserved = report.reserved and replace(report.reserved, budget_nbytes=limit_nbytes)
    facts = (*report.facts, Fact("Planned with", text))
    return replace(report, budget_nbytes=limit_nbytes, reserved=reserved, facts=facts)


def _infeasible(refusal: InfeasibleBudget) -> InfeasibleBudget:
    """That no plan allocates so little."""
    refusal.add_note(
        "That is of what is allocated. What is reserved is never less, and more as a rule: a "
        'budget of so much "reserved" is refused, too.'
    )
    return refusal


def _over_reserved(limit_nbytes: int, tried: Sequence[Tried[Planned]]) -> OverReserved:
    """That of the plans that were tried, the one that reserves least reserves more."""
    least = min(tried, key=lambda one: one.reserved_nbytes)
    report = least.made.report
    cases = () if report.reserved is None else report.reserved.cases
    fitting = [c.setting for c in cases if c.fits and c.peak_nbytes <= limit_nbytes]
    return OverReserved(
        budget_nbytes=limit_nbytes,
        smallest_peak_nbytes=least.reserved_nbytes,
        floor_nbytes=report.resident_nbytes,
        resident=report.resident,
        advice=report.advice,
        allocated_nbytes=report.reserved.default.allocated_nbytes if report.reserved else 0,
        setting=fitting[0] if fitting else "",
    )
