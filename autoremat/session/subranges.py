"""Plans for parts of a range of sizes, beside that for the largest.

Enters: `Steps` that are settled, whose graphs were planned for ranges of sizes. Leaves: their
parts, with the further plans that runs choose from by the sizes of their call. Guarantees: each is
proven to be within the budget at all sizes that it is for, whichever of their plans the other
graphs run by; they are made once, when two steps have shown what the graphs have beside them, and
dropped where the step turns out to have no room for them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import astuple, replace

from autoremat import _torch
from autoremat.planning.asked import store
from autoremat.planning.choice import as_chosen, recomputed_share
from autoremat.planning.curve import Curve
from autoremat.planning.nesting import Around, placed
from autoremat.planning.part import Part, Planned
from autoremat.planning.pipeline import choose, stated_at
from autoremat.planning.ranges import covered
from autoremat.planning.sizes import Symbols
from autoremat.planning.subranges import WORTH, Corner, corners_worth_a_plan
from autoremat.session.afterwards import with_later_baseline
from autoremat.session.reports import explained
from autoremat.session.steps import Steps
from autoremat.session.under_autocast import narrowed_by

KNOWN_STEPS = 2  # until the optimizer's state is there, and what else the first steps show


class Subranges:
    """Of the graphs of one session."""

    def __init__(self, steps: Steps, dynamo: Mapping[str, _torch.DynamoGraph]) -> None:
        """None are known.

        Args:
            steps: the session's.
            dynamo: its graphs, as Dynamo handed them over.
        """
        self.lows: dict[str, Symbols] = {}  # by graph, the smallest sizes that were said
        self._steps, self._dynamo = steps, dynamo
        self._seen = Around()  # what was known to be beside the graph when its plans were checked

    def due(self) -> str | None:
        """A graph for which there may be further plans, before a step that needs no others."""
        steps, setting = self._steps, self._steps.options.setting
        ran = list(dict.fromkeys(steps.graphs.graphs))
        parts = {name: part for name in ran if (part := steps.graphs.parts.get(name))}
        proven = [n for n, part in parts.items() if part.covered and part.covered.is_proven]
        if not proven or len(parts) < len(ran):
            return None
        self._keep_fitting(proven)
        name = next((n for n in proven if parts[n].smaller is None), None)
        is_chosen = setting.steering.choice or setting.steering.known or setting.offload
        is_early = steps.number < KNOWN_STEPS or any(n in steps.graphs.provisional for n in ran)
        is_divided = bool(steps.graphs.rich_from) or len(steps.graphs.orders) != 1
        if name is None or is_early or is_divided or is_chosen or steps.options.budget.is_least:
            return None
        return name if steps.peak_nbytes <= steps.budget_nbytes else None

    def plan(self, name: str) -> list[Part]:
        """Make the plans of a graph that are worth it.

        Args:
            name: as `due` told it.

        Returns:
            What the graph has from now on beside the plan for the largest sizes.
        """
        steps = self._steps
        part = steps.graphs.parts[name]
        steps.graphs.parts[name] = part = replace(part, smaller=())
        if any(_torch.is_collective(node.target) for node in part.subject.joint.nodes):
            return []  # ranks have batches of different sizes, and would communicate otherwise
        choice, known = part.choice, part.covered
        assert known is not None
        beyond_nbytes = max(0, steps.peak_nbytes - choice.peak_nbytes)
        budget_nbytes = steps.budget_nbytes - beyond_nbytes
        subject = part.subject
        subject = as_chosen(
            replace(subject, lowered=placed(subject.lowered, part.planned.whole.counted)), choice
        )
        plan, simulated_nbytes = choice.solution.plan, choice.solution.timeline.peak_nbytes
        room_nbytes = budget_nbytes - max(0, choice.needed_nbytes - simulated_nbytes)
        lows = self.lows.get(name, {})
        corners = corners_worth_a_plan(subject, plan, room_nbytes, known, lows)
        found = [one for c in corners if (one := self._part_at(name, part, c, budget_nbytes))]
        found.sort(key=lambda one: recomputed_share(one.choice))
        steps.graphs.parts[name] = replace(part, smaller=tuple(found), _reports={})
        self._keep_those_that_fit(name)
        return list(steps.graphs.parts[name].smaller or ())

    def _part_at(self, name: str, part: Part, corner: Corner, budget_nbytes: int) -> Part | None:
        """A plan up to a corner; None if it is no better there, or not proven."""
        options, graph = self._steps.options, self._dynamo[name]
        assert part.covered is not None
        with graph.resumed():  # generated code may be read
            subject = stated_at(part.subject, corner.numbers, options.setting)
            counted = part.planned.whole.counted
            beside = replace(subject, lowered=placed(subject.lowered, counted))
            choice = choose(beside, budget_nbytes, options.setting)
            known = covered(as_chosen(beside, choice), choice.solution.plan, part.covered.names)
        now, before = recomputed_share(choice), recomputed_share(part.choice)
        is_faster = 1 + now < (1 - WORTH) * (1 + before)
        if not (choice.fits and known.is_proven and is_faster):
            return None
        planned = Planned(
            subject,
            with_later_baseline(choice, lambda: graph, options),
            counted=counted,
            explain=functools.partial(explained, name, narrowed_by(graph, options)),
            stored=store(subject, choice),
            curve=Curve(),
        )
        return replace(
            part, planned=planned, covered=known, shrunk=corner.shrunk, smaller=(), _reports={}
        )

    def _keep_fitting(self, names: list[str]) -> None:
        """Of graphs' further plans, those by which the step takes no more than it may."""
        now = self._steps.surroundings.now
        if now.is_beyond(self._seen):
            for name in names:
                self._keep_those_that_fit(name)
        self._seen = now

    def _keep_those_that_fit(self, name: str) -> None:
        steps = self._steps
        whole = steps.graphs.parts[name]
        if whole.smaller:
            fitting = tuple(part for part in whole.smaller if self._fits(name, part))
            steps.graphs.parts[name] = replace(whole, smaller=fitting, _reports={})

    def _fits(self, name: str, part: Part) -> bool:
        """Whether a step is within its budget where a graph runs by this plan.

        Other graphs may run by any of theirs: none of them leaves more beside the others than the
        plan for the largest sizes does, so that a step by that of all others is the highest.
        """
        steps = self._steps
        around, whole = steps.surroundings.now, steps.graphs.parts[name]
        before = steps.graphs.beside(around)
        steps.graphs.parts[name] = part
        try:
            is_within = steps.peak_nbytes <= steps.budget_nbytes
            after = steps.graphs.beside(around)
        finally:
            steps.graphs.parts[name] = whole
        return is_within and all(
            now_nbytes <= then_nbytes
            for other, then in before.items()
            for now_nbytes, then_nbytes in zip(astuple(after[other]), astuple(then), strict=True)
        )
