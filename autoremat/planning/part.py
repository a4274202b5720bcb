"""One planned graph of a step, and its peak whatever is held beside it.

Enters: a graph's choice of a plan, as it was made beside what was known then; or the figures of one
that need not be there. Leaves: its peaks beside anything else or at other sizes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from autoremat.ask.plan_file import StoredGraph
from autoremat.memory.residents import Resident
from autoremat.planning.choice import Baseline, Choice, as_chosen
from autoremat.planning.curve import Curve
from autoremat.planning.figures import (
    Figures,
    Gradient,
    KeptFigures,
    given_away_nbytes,
    highest_of,
    letting_go,
    shared_out,
)
from autoremat.planning.formula import formula_or_none
from autoremat.planning.nesting import Beside, Crossing, Kept, Region, placed
from autoremat.planning.plain import plain_crossing
from autoremat.planning.ranges import Covered
from autoremat.planning.sizes import Symbols, peak_at, sizes_of, subject_at
from autoremat.planning.uncheckpointed import Uncheckpointed
from autoremat.problem.lower import as_written
from autoremat.problem.subject import Subject
from autoremat.reporting import GraphReport, PeakFormula


class PlannedAs(Protocol):
    """A graph and the plan that it runs by, or what finds them once they are asked for."""

    @property
    def whole(self) -> Planned:
        """Both."""

    @property
    def figures(self) -> Figures | KeptFigures:
        """All that steps ask of it while they run."""


@dataclass(frozen=True)
class Planned:
    """A graph and the plan that it runs by.

    Attributes:
        subject: the graph alone; code between the graphs counts as resident.
        choice: its plan.
        counted: what the choice's peak counts beside the graph.
        explain: its report, given a subject, the same in a step without a plan, a choice of it,
            the formula of its peak and, where advice is wanted, what is resident.
        stored: what a file keeps of the plan.
        curve: peaks and times of other plans.
    """

    subject: Subject
    choice: Choice
    counted: Beside
    explain: Callable[[Subject, Subject, Choice, PeakFormula | None, Resident | None], GraphReport]
    stored: StoredGraph
    curve: Curve

    @property
    def whole(self) -> Planned:
        """See `PlannedAs`."""
        return self

    @functools.cached_property
    def figures(self) -> Figures:
        """See `PlannedAs`."""
        return Figures(self.subject, self.choice, self.counted)

    @functools.cached_property
    def plain_crossing(self) -> Crossing:
        """What the graph hands to its backward where it runs without a plan."""
        return plain_crossing(self.subject, reads=self.choice.is_read)

    @functools.cached_property
    def uncheckpointed(self) -> Uncheckpointed:
        """The graph without the user's own checkpoints."""
        return Uncheckpointed(self.subject, self.choice)


class Recalled:
    """A graph whose plan another process has made and written out: only its figures are here."""

    def __init__(self, figures: KeptFigures, make: Callable[[], Planned]) -> None:
        """Of these figures.

        Args:
            figures: as they were kept.
            make: traces the graph and plans it as it was planned; for reports and other plans.
        """
        self.figures = figures
        self._make = make

    @functools.cached_property
    def whole(self) -> Planned:
        """See `PlannedAs`."""
        return self._make()


@dataclass(frozen=True)
class Part:
    """One planned graph of the step.

    Attributes:
        planned: the graph and its plan.
        between_nbytes: of what is resident, what code before the graph holds.
        resident: what the step held whatever the plan, when the graph was planned.
        growth: by which factor its symbolic sizes may grow within the budget.
        covered: given if it was planned for ranges of sizes, at their upper corner: how far that
            holds below.
        shrunk: by which factor the largest sizes are larger than those that these are.
        corner: of that, by which factor they are larger than those that it was planned for.
        smaller: plans for parts of the ranges, the fastest first; None if none were looked for.
        planned_for: the same at the sizes that it was planned for, if these are others.
        is_resized: whether its symbolic sizes stand for others than it was planned for.
        is_larger: whether one of them is larger than then.
        is_run_again: whether a checkpoint runs its forward again as its backward begins.
        held: share of what it returns that somebody holds then, at most.
        counted_on: of that, what its plan counts on.
        is_kept: whether its backward keeps what crosses to it, for another backward.
    """

    planned: PlannedAs
    between_nbytes: int
    resident: Resident
    growth: float = 1.0
    covered: Covered | None = None
    shrunk: float = 1.0
    corner: float = 1.0
    smaller: tuple[Part, ...] | None = None
    planned_for: PlannedAs | None = None
    is_resized: bool = False
    is_larger: bool = False
    is_run_again: bool = False
    held: float = 1.0
    counted_on: float = 1.0
    is_kept: bool = False
    _reports: dict[tuple[Beside, Beside, bool], GraphReport] = field(default_factory=dict)

    @property
    def subject(self) -> Subject:
        """The graph alone."""
        return self.planned.whole.subject

    @property
    def choice(self) -> Choice:
        """Its plan."""
        return self.planned.whole.choice

    @property
    def figures(self) -> Figures | KeptFigures:
        """All that steps ask of it while they run."""
        return self.planned.figures

    @property
    def resident_nbytes(self) -> int:
        """What is live all the time, with what code before the graph held when it was planned."""
        return self.figures.resident_nbytes

    @property
    def step_resident_nbytes(self) -> int:
        """The same without what code before the graph held, nor what is gathered for it."""
        own_nbytes = self.between_nbytes + self.resident.traffic.window_nbytes
        return self.resident_nbytes - own_nbytes

    @functools.cached_property
    def gradients(self) -> list[Gradient]:
        """The same, each."""
        share = self.resident.traffic.gradient_share
        found = self.figures.gradients
        return [Gradient(n, int(share * nbytes), bool(is_view)) for n, nbytes, is_view in found]

    @functools.cached_property
    def run_again(self) -> Part:
        """The same in a checkpoint."""
        return replace(self, is_run_again=True, _reports={})

    @functools.cached_property
    def kept(self) -> Part:
        """The same where its backward keeps its graph."""
        return replace(self, is_kept=True, _reports={})

    def as_held(self, share: float) -> Part:
        """The same where so much of what it returns is held as its backward begins."""
        if share >= 1:
            return self
        return self._by_held.setdefault(share, replace(self, held=share, _reports={}))

    @property
    def _held_nbytes(self) -> int:
        """Of what it returns, what somebody holds as its backward begins, at most."""
        return math.ceil(self.held * self.figures.outputs_nbytes)

    @property
    def gone_nbytes(self) -> int:
        """Of what it returns, what nobody holds then, at least."""
        return self.figures.outputs_nbytes - self._held_nbytes

    @functools.cached_property
    def _by_held(self) -> dict[float, Part]:
        return {}

    def kept_by(self, region: Region, crossing: Crossing) -> Kept:
        """What a run of it in a region keeps, where so much crosses to its backward."""
        return Kept.of(region, crossing, self.figures.outputs_nbytes, self.resident.traffic)

    def report(
        self, found: Beside, plain: Beside, *, reads: bool = True, accumulates: bool = False
    ) -> GraphReport:
        """The graph's report.

        Args:
            found: what is held beside it.
            plain: the same in a step without a plan.
            reads: whether code may be read to tell what the step takes without a plan, a formula
                be made, and advice be computed.
            accumulates: whether steps need the gradients that they find.
        """
        is_told = reads or not self.choice.is_read
        for known, report in self._reports.items():
            if not is_told and (known[0], known[2]) == (found, accumulates):
                return report  # one that tells more
        key = found, plain, accumulates
        if key not in self._reports:
            is_of_backward = self.peak_in_backward(found) == self.peak_nbytes(found)
            shown = found if is_of_backward else found.throughout
            before, of_plain = Baseline(0, self.choice.baseline_time_us()), shown
            if is_told:
                before, of_plain = self._baseline(plain)
            subject, other = self._shown(shown), self._shown(of_plain)
            choice = replace(
                self.choice, peak_nbytes=self.peak_nbytes(found), baseline=lambda: before
            )
            explain = self.planned.whole.explain
            if not (is_told and reads):
                return explain(subject, other, choice, None, None)
            resident = replace(self.resident, accumulates=accumulates)
            report = explain(subject, other, choice, self._formula(shown), resident)
            of_smaller = (one._formula(shown) for one in self.smaller or ())
            smaller = tuple(formula.up_to_planned() for formula in of_smaller if formula)
            report = replace(report, smaller_formulas=smaller)
            self._reports.clear()
            self._reports[key] = report
        return self._reports[key]

    def peak_nbytes(self, found: Beside) -> int:
        """The real peak, so much being held beside the graph."""
        forward_nbytes, backward_nbytes = self.own_peaks
        own = (self.in_forward(forward_nbytes), backward_nbytes)
        return self.resident_nbytes + highest_of(own, found)

    def in_forward(self, own_nbytes: int) -> int:
        """The peak of a forward that takes so much itself, with what it is gathered into."""
        traffic = self.resident.traffic
        return max(own_nbytes + traffic.forward_nbytes, traffic.entering_nbytes)

    def peak_in_backward(self, found: Beside) -> int:
        """The peak of the backward alone, so much being held beside the graph."""
        return self.resident_nbytes + self.own_peaks[1] + found.most_nbytes

    def by(self, choice: Choice, stored: StoredGraph) -> Part:
        """The same graph by another plan, which a file keeps so; nothing is told of more plans."""
        whole = replace(self.planned.whole, choice=choice, stored=stored, curve=Curve())
        return replace(self, planned=whole, growth=1.0, _reports={})

    def with_optimizer(self, resident: Resident) -> Part:
        """The same graph and plan, beside the optimizer of a step that holds this."""
        return self._beside(self.resident.with_optimizer(resident))

    def with_unseen(self, nbytes: int) -> Part:
        """The same graph and plan, beside so much more that no tensor shows."""
        return self._beside(self.resident.with_unseen(nbytes))

    def _beside(self, resident: Resident) -> Part:
        more_nbytes = resident.nbytes - self.resident.nbytes
        lowered = self.subject.lowered
        shell = replace(
            lowered.shell,
            resident_nbytes=lowered.shell.resident_nbytes + more_nbytes,
            optimizer_nbytes=resident.transient_nbytes,
        )
        planned = replace(
            self.planned.whole,
            subject=replace(self.subject, lowered=replace(lowered, shell=shell)),
            choice=replace(self.choice, peak_nbytes=self.choice.peak_nbytes + more_nbytes),
        )
        return replace(self, planned=planned, resident=resident, smaller=None, _reports={})

    def for_call(self, numbers: Symbols) -> Part:
        """The plan for a call of these sizes: one for a part of the ranges, or this."""
        return next((part for part in self.smaller or () if part.is_for(numbers)), self)

    def is_for(self, numbers: Symbols) -> bool:
        """Whether sizes are within those of the part of the ranges that it is for, if of a part."""
        most = self.subject.sizes
        return most.keys() <= numbers.keys() and all(numbers[s] <= n for s, n in most.items())

    def at(self, numbers: Symbols) -> Part:
        """The same graph and plan, its symbolic sizes standing for other numbers."""
        planned = sizes_of(self.subject) if numbers else {}
        if all(planned.get(symbol) == number for symbol, number in numbers.items()):
            return self
        resized = subject_at(self.subject, numbers)
        if resized.lowered.problem == self.subject.lowered.problem:
            return self  # all that differs is how its inputs are laid out
        subject, plan = as_chosen(self.subject, self.choice), self.choice.solution.plan
        peak_nbytes = peak_at(subject, plan, self.peak_nbytes(Beside()), numbers)
        choice = replace(self.choice, peak_nbytes=peak_nbytes, torchs=None)
        resized = resized if subject is self.subject else subject_at(subject, numbers)
        whole = replace(self.planned.whole, subject=resized, choice=choice, counted=Beside())
        ratios = {symbol: planned.get(symbol, n) / max(1, n) for symbol, n in numbers.items()}
        is_larger = min(ratios.values()) < 1
        is_within = self.covered is not None and not is_larger
        shrunk = self.shrunk * self.covered.shrunk(ratios) if self.covered and is_within else 1.0
        return replace(
            self,
            planned=whole,
            planned_for=self.planned_for or self.planned,
            is_resized=not is_within,
            is_larger=is_larger,
            shrunk=shrunk,
            _reports={},
        )

    @functools.cached_property
    def kept_growth(self) -> float:
        """By which factor what it keeps for its backward is more at the largest sizes."""
        if self.planned_for is None or self.is_resized:  # of those beyond its ranges nobody knows
            return self.corner
        most_nbytes = self.planned_for.figures.crossing.nbytes
        return self.corner * most_nbytes / max(1, self.figures.crossing.nbytes)

    @functools.cached_property
    def own_peaks(self) -> tuple[int, int]:
        """Of forward and backward, above what is resident and what is held beside the graph."""
        figures = self.figures
        forward, backward = figures.forward_nbytes, figures.backward_nbytes
        if self.held < 1:
            backward -= self.lower_by(figures.given_away_nbytes)
        if self.is_kept:
            backward += figures.kept_nbytes
        if self.is_run_again:  # beside the gradients that it is given
            backward = max(forward + figures.tangents_nbytes, backward)
        return forward, backward

    def lower_by(self, given_away_nbytes: int) -> int:
        """How much of that is gone: what is held counts, whether it adds to the peak or not."""
        return max(0, given_away_nbytes - self._held_nbytes)

    def _shown(self, found: Beside) -> Subject:
        """The graph, so much being held beside it, and of its results where its plan counts so."""
        subject = self.subject
        if self.counted_on < 1:
            subject = letting_go(subject, self._held_nbytes)
        return replace(subject, lowered=placed(subject.lowered, found))

    def _formula(self, found: Beside) -> PeakFormula | None:
        """Of the peak over the sizes that vary, so much being held beside the graph."""
        if self.choice.solution.plan.offloaded:
            return None  # nobody states sizes of what waits elsewhere yet
        subject = self._shown(found)
        return formula_or_none(subject, self.choice, self.covered.names if self.covered else None)

    def _baseline(self, found: Beside) -> tuple[Baseline, Beside]:
        """The step without a plan, so much being held beside it, and which of that its peak has."""
        counted, problem = self.choice.baseline(), self.subject.lowered.problem
        beside = self.planned.whole.counted
        plan = as_written(problem)
        own = shared_out(problem, plan, counted.peak_nbytes, beside)
        if self.held < 1:
            lower_by_nbytes = self.lower_by(given_away_nbytes(self.subject, problem, plan))
            own = own[0], own[1] - lower_by_nbytes
        highest_nbytes = highest_of(own, found)
        shown = found if own[1] + found.most_nbytes == highest_nbytes else found.throughout
        return replace(counted, peak_nbytes=self.resident_nbytes + highest_nbytes), shown
