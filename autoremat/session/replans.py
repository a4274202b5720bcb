"""Whether a step is to be planned anew, as far as steps have shown.

Enters: the graphs that steps ran, what was beside them, and the budget. Leaves: whether other plans
are due, or possible. Guarantees: steps that are alike are not planned anew without end: plans are
made for more runs, for more beside the graphs, or for other graphs than those before them, and
where those did not fit, for less beside the graphs.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import astuple
from typing import Protocol

import torch

from autoremat import _torch
from autoremat.ask.options import Options
from autoremat.errors import OffloadError
from autoremat.planning.nesting import Around
from autoremat.planning.step import Step
from autoremat.session.measured import is_counted
from autoremat.session.surroundings import Surroundings
from autoremat.watch.open_run import SCALARS_NBYTES

USUAL_REPLANS = 2  # for what is found beside the graphs, and for what that step has shown
WORTH_A_PLAN = 0.02  # of the budget above what is resident: less that is unused stays so
WORTH_MORE = 0.005  # of a step's time: who recomputes less than that needs no more memory
SHOWN_BY = 2  # steps, it is taken to be known whether their results are held
MEASURED_FIRST = 3  # steps, in two of which an allocator may show more, before the next has a plan
MOST_REPLANS = 8  # of one that runs ever more graphs, or has ever more beside them


def usual_steps(device: torch.device) -> int:
    """How many steps, after the first, usually show all that is planned anew for."""
    return USUAL_REPLANS + (MEASURED_FIRST if is_counted(device) else 0)


class Budgeted(Protocol):
    """A session's steps, under their budget."""

    options: Options
    graphs: Step
    surroundings: Surroundings
    number: int
    reruns_layers: bool

    @property
    def budget_nbytes(self) -> int:
        """The budget on the device of the graphs."""

    @property
    def peak_nbytes(self) -> int:
        """The highest predicted peak of the step that is known of, or 0."""

    @property
    def peak_to_come_nbytes(self) -> int:
        """The same, or that of a step with as many runs as are planned for, if it is higher."""


class Replans:
    """Those of one session.

    Attributes:
        count: how many there were.
        with_gone: graphs that may be planned as if what is gone of their results were no part of
            the step: none that somebody has held results of since.
    """

    def __init__(self, steps: Budgeted) -> None:
        """None yet."""
        self.count = 0
        self._steps = steps
        self._made_for: list[list[str]] = []  # graphs of each step
        self._lasting: set[tuple[str, str]] = set()  # when plans were made last
        self._have_fitted = True  # the plans that were made last
        self._made_beside = Around()  # what was beside the graphs then
        self._waiting_nbytes = 0  # elsewhere, by the plans that were made last
        self._have_layers_lightened = False  # since then
        self.with_gone: set[str] = set()
        self._held_again: set[str] = set()

    def begin(self) -> None:
        """The step is about to be planned anew."""
        self._held_again |= self._steps.graphs.held_again
        self.with_gone = (self.with_gone | self._newly_gone) - self._held_again

    def made(self) -> None:
        """The step was planned anew, for what is known of it."""
        graphs = self._steps.graphs
        self.count += 1
        self._made_for, self._lasting = graphs.room.longest, graphs.lasting
        self._have_fitted = self._steps.peak_to_come_nbytes <= self._steps.budget_nbytes
        self._made_beside = self._steps.surroundings.now
        self._waiting_nbytes = graphs.host_nbytes(self._made_beside)
        self._have_layers_lightened = self._may_rerun_layers
        self._steps.reruns_layers |= self._have_layers_lightened

    @property
    def are_ruled_out(self) -> bool:
        """Whether the user chose."""
        return bool(self._steps.options.setting.steering.choice)

    @property
    def are_open(self) -> bool:
        """Whether there may be another, if more is found: those made so far have fitted."""
        return self._have_fitted and self.count < MOST_REPLANS and not self.are_ruled_out

    @property
    def is_due(self) -> bool:
        """Whether the step is to be planned anew, now that all of it was seen."""
        steps, graphs = self._steps, self._steps.graphs
        if not graphs.parts or self.are_ruled_out:
            return False
        graphs.note_longest()
        if steps.options.budget.is_least:  # each graph alone is the leanest: that is not the step
            return self._is_longer
        if not graphs.room.longest:
            return False
        is_above = steps.peak_to_come_nbytes > steps.budget_nbytes or self._overfills_host
        if graphs.provisional:
            return is_above or not graphs.repeats.is_unclear
        return (is_above and self._is_possible) or self._has_other_runs or bool(self._newly_gone)

    @property
    def is_optional(self) -> bool:
        """Whether plans that are due are only to be faster: those of now fit steps like these."""
        return self._is_within and not self._overfills_host

    @property
    def is_for_host(self) -> bool:
        """Whether they are only to send less away."""
        return self._is_within and self._overfills_host

    @property
    def _is_within(self) -> bool:
        """Whether the device has room for steps like these by the plans of now."""
        steps = self._steps
        if steps.options.budget.is_least or steps.graphs.provisional or not self._have_fitted:
            return False
        return steps.peak_to_come_nbytes <= steps.budget_nbytes and not self._has_other_runs

    @property
    def is_coming(self) -> bool:
        """Whether a step that is above the budget now is planned anew after it.

        In its midst that is no promise: what has not been seen yet may need the room that is there.
        `Told` says so of a step for which no plan came.
        """
        may_be = self._is_possible or bool(self._steps.graphs.provisional)
        is_above = self._steps.peak_nbytes > self._steps.budget_nbytes  # else none would change it
        return may_be and not self.are_ruled_out and is_above

    @property
    def _may_rerun_layers(self) -> bool:
        """Whether layers in eager mode had better run again in the backward: no plans have fitted.

        What they save then is there only for a moment, and plans are made for what that leaves.
        """
        steps = self._steps
        has_layers = bool(steps.graphs.eager_gradient_nbytes)
        return has_layers and not (self._have_fitted or steps.reruns_layers or self.are_ruled_out)

    @property
    def are_exhausted(self) -> bool:
        """Whether no plan that is searched for takes less: what is above the budget stays so."""
        if self._steps.options.setting.steering.choice:
            return False
        if any(not part.figures.fits for part in self._steps.graphs.current):
            return True
        return bool(self.count) and not self._is_longer and not self._is_other

    @property
    def none_would_fit(self) -> bool:
        """Whether the leanest plans of all graphs take more than the budget, beside what is there.

        To be asked of graphs that no plan is made for anew: would others have been of any use?
        """
        steps = self._steps
        least_nbytes = steps.graphs.room.least_nbytes(steps.surroundings.now)
        return least_nbytes > steps.budget_nbytes

    @property
    def _is_possible(self) -> bool:
        """Whether another plan is possible, and there is something that the present one lacks."""
        if self.are_ruled_out or self.count >= MOST_REPLANS:
            return False
        return self._is_longer or self._is_other

    @property
    def _overfills_host(self) -> bool:
        """Whether more may wait elsewhere than there is room for, and than was planned last."""
        steps, host = self._steps, self._steps.options.setting.offload
        if host is None or _torch.job_store() is not None:  # ranks may have different room
            return False
        with suppress(OffloadError):  # the step itself tells of it, if it needs more
            known_nbytes = max(self._waiting_nbytes, host.free_nbytes)
            return steps.graphs.host_nbytes(steps.surroundings.now) > known_nbytes
        return False

    @property
    def _is_longer(self) -> bool:
        """Whether the step runs several graphs, and more of any than it was planned for."""
        now = Counter(self._steps.graphs.graphs)
        return now.total() > 1 and not any(now <= Counter(step) for step in self._made_for)

    @property
    def _is_other(self) -> bool:
        """Whether it runs other graphs, or beside more, than it was planned for.

        In the midst of a step, its later backwards have not shown yet what they take.
        """
        steps, graphs = self._steps, self._steps.graphs
        has_more = steps.peak_nbytes > graphs.peak_nbytes(steps.surroundings.planned)
        if not self._made_for:
            return has_more or bool(graphs.kept)
        # More beside plans that did not fit makes none fit, nor do other graphs.
        has_changed = has_more or graphs.graphs not in self._made_for
        lasts = not graphs.lasting <= self._lasting or bool(graphs.held_again)
        has_less = self._have_layers_lightened or self._has_room
        return (has_changed and self._have_fitted) or lasts or has_less

    @property
    def _has_room(self) -> bool:
        """Whether the step could take clearly less than when no plans fitted.

        Beside other models, say, that were planned after the same step, each beside the others' old
        plans.
        """
        if self._have_fitted:
            return False
        now, before = self._steps.surroundings.now, self._made_beside
        if sum(astuple(now)) + self._worthwhile_nbytes > sum(astuple(before)):
            return False
        least_nbytes = self._steps.graphs.room.least_nbytes
        return least_nbytes(now) + self._worthwhile_nbytes <= least_nbytes(before)

    @property
    def _worthwhile_nbytes(self) -> int:
        """What is worth a plan, if the budget has so much more or less of room."""
        residents = (part.resident_nbytes for part in self._steps.graphs.current)
        room_nbytes = self._steps.budget_nbytes - max(residents, default=0)
        return max(SCALARS_NBYTES, int(WORTH_A_PLAN * room_nbytes))

    @property
    def _newly_gone(self) -> set[str]:
        """Graphs that recompute beside room which their results, that nobody holds, have left.

        Each is found once: it may turn out that the room cannot be used. Where code around the
        graphs holds or takes something, that is known less well, and the room is left to it.
        """
        steps, graphs = self._steps, self._steps.graphs
        around = steps.surroundings.found
        # Until the backward, code around the graphs may hold no more than these very results.
        returned = (part.figures.outputs_nbytes for part in graphs.current if part.gone_nbytes)
        around_nbytes = sum(astuple(around)) - min(around.eager_nbytes, sum(returned))
        is_known = steps.number >= SHOWN_BY and around_nbytes <= SCALARS_NBYTES
        if not (graphs.current and is_known) or self.count >= MOST_REPLANS // 2:
            return set()
        least_nbytes = self._worthwhile_nbytes
        if steps.budget_nbytes - steps.peak_to_come_nbytes < least_nbytes:
            return set()
        known = self.with_gone | self._held_again
        return graphs.giving_away(least_nbytes, WORTH_MORE) - known

    @property
    def _has_other_runs(self) -> bool:
        """Whether plans for other numbers of runs are due."""
        if self.count >= MOST_REPLANS:
            return False
        room = self._steps.graphs.room
        given = self._steps.budget_nbytes, self._steps.surroundings.now
        if room.is_needed and not room.suffices(*given):
            return True
        # The rest is left for steps above the budget: these are within it.
        return 0 < self.count < MOST_REPLANS // 2 and room.is_outgrown(*given)
