"""Plans for parts of a range of sizes, beside that for the largest.

Enters: `Steps` that are settled, whose only graph was planned for ranges of sizes. Leaves: its
part, with the further plans that its runs choose from by the sizes of their call. Guarantees: each
is proven to be within the budget at all sizes that it is for; they are made once, when two steps
have shown what the graph has beside it, and dropped where the step turns out to have no room for
them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace

from autoremat import _torch
from autoremat.planning.asked import store
from autoremat.planning.choice import as_chosen, recomputed_share
from autoremat.planning.curve import Curve
from autoremat.planning.nesting import Around, placed
from autoremat.planning.part import Part, Planned
from autoremat.planning.pipeline import choose, over_sizes, stated_at
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
        """The graph for which there may be further plans, before a step that needs no others."""
        steps, setting = self._steps, self._steps.options.setting
        ran = steps.graphs.graphs
        part = steps.graphs.parts.get(ran[0]) if len(ran) == 1 else None
        if part is None or part.covered is None or not part.covered.is_proven:
            return None
        if part.smaller is not None:
            self._keep_fitting(ran[0], part)
            return None
        is_chosen = setting.steering.choice or setting.steering.known or setting.offload
        is_early = steps.number < KNOWN_STEPS or ran[0] in steps.graphs.provisional
        if is_early or is_chosen or steps.options.budget.is_least or not part.figures.fits:
            return None
        return ran[0]

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
        part = replace(part, smaller=tuple(found), _reports={})
        self._keep_fitting(name, part)
        return list(steps.graphs.parts[name].smaller or ())

    def _part_at(self, name: str, part: Part, corner: Corner, budget_nbytes: int) -> Part | None:
        """A plan up to a corner; None if it is no better there, or not proven."""
        options, graph = self._steps.options, self._dynamo[name]
        assert part.covered is not None
        with graph.resumed():  # generated code may be read
            subject = stated_at(part.subject, corner.numbers, options.setting)
            subject = over_sizes(subject, self.lows.get(name, {}), options.setting)
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

    def _keep_fitting(self, name: str, part: Part) -> None:
        """Of a graph's further plans, those by which the step takes no more than it may."""
        now = self._steps.surroundings.now
        if part.smaller and (now.is_beyond(self._seen) or part is not self._part(name)):
            fitting = tuple(self._fitting(name, part.smaller))
            part = replace(part, smaller=fitting, _reports={})
        self._seen = now
        self._steps.graphs.parts[name] = part

    def _part(self, name: str) -> Part:
        return self._steps.graphs.parts[name]

    def _fitting(self, name: str, parts: tuple[Part, ...]) -> Iterator[Part]:
        steps, whole = self._steps, self._part(name)
        for part in parts:
            steps.graphs.parts[name] = part
            try:
                fits = steps.peak_nbytes <= steps.budget_nbytes
            finally:
                steps.graphs.parts[name] = whole
            if fits:
                yield part
