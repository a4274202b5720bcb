"""Plans for parts of a range of sizes, beside that for the largest.

Enters: `Steps` that are settled, whose graphs were planned for ranges of sizes. Leaves: their
parts, with the further plans that runs choose from by the sizes of their call. Guarantees: each is
proven to be within the budget at all sizes that it is for; they are made once, when two steps have
shown what the graphs have beside them, and dropped where the step turns out to have no room for
them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoremat import _torch
from autoremat.planning.asked import store
from autoremat.planning.choice import as_chosen, recomputed_share
from autoremat.planning.curve import Curve
from autoremat.planning.nesting import Around, placed
from autoremat.planning.part import Part, Planned, PlannedAs
from autoremat.planning.pipeline import choose, over_sizes, stated_at
from autoremat.planning.ranges import covered
from autoremat.planning.sizes import Symbols
from autoremat.planning.subranges import WORTH, Corner, Worth, plan_parts
from autoremat.session.afterwards import with_later_baseline
from autoremat.session.reports import explained
from autoremat.session.steps import Steps
from autoremat.session.subranges_together import Together, are_of_one_step
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
        self._seen = Around()  # what was known to be beside the graphs when plans were checked
        self._plans: list[PlannedAs] = []  # of all graphs then
        self._beside: dict[str, set[str]] = {}  # by graph, those of the steps it was checked in

    def due(self) -> tuple[str, ...]:
        """The graphs for which there may be further plans, before a step that needs no others."""
        steps, setting = self._steps, self._steps.options.setting
        self._drop_where_others_run()
        names = self._of_one_step()
        parts = {name: part for name in names if (part := steps.graphs.parts.get(name))}
        if not parts or len(parts) < len(names):  # layers in eager mode
            return ()
        if any(part.covered is None or not part.covered.is_proven for part in parts.values()):
            return ()
        if all(part.smaller is not None for part in parts.values()):
            self._keep_fitting(names)
            return ()
        is_chosen = setting.steering.choice or setting.steering.known or setting.offload
        is_early = steps.number < KNOWN_STEPS or not steps.graphs.provisional.isdisjoint(names)
        if is_early or is_chosen or steps.options.budget.is_least or steps.step_sizes.are_several:
            return ()
        if steps.peak_to_come_nbytes > steps.budget_nbytes or not self._may_be_planned(parts):
            return ()
        return names

    def _of_one_step(self) -> tuple[str, ...]:
        """The graphs that each step runs once, if it runs any of these; () if others do as well."""
        ran = self._steps.graphs.graphs
        forms = self._steps.graphs.steps_with(ran[0]) if ran else []
        names = tuple(dict.fromkeys(name for form in forms for name in form))
        return names if all(len(form) == len(names) for form in forms) else ()

    def _drop_where_others_run(self) -> None:
        """Plans were looked at beside other runs, or sizes, than their steps have had since."""
        graphs, are_several = self._steps.graphs, self._steps.step_sizes.are_several
        for name, part in list(graphs.parts.items()):
            if part.smaller:
                forms = graphs.steps_with(name)
                beside = {other for form in forms for other in form}
                runs_again = any(len(set(form)) < len(form) for form in forms)
                if are_several or runs_again or beside != self._beside.get(name, beside):
                    graphs.parts[name] = _with_smaller(part, ())

    def _may_be_planned(self, parts: Mapping[str, Part]) -> bool:
        """Whether these are all graphs of the steps to come, and their sizes are known."""
        if len(parts) == 1:
            return True
        graphs = self._steps.graphs
        is_whole = set(parts) == set(graphs.known_graphs) and len(graphs.orders) == 1
        # Ranks may come to it in different steps.
        is_plain = not graphs.rich_from and _torch.job_store() is None
        return is_whole and is_plain and are_of_one_step(parts, self.lows)

    def plan(self, names: Sequence[str]) -> dict[str, tuple[Part, ...]]:
        """Make the plans of graphs that are worth it.

        Args:
            names: as `due` told them.

        Returns:
            What each graph has from now on beside the plan for the largest sizes.
        """
        parts = self._steps.graphs.parts
        for name in names:
            parts[name], self._beside[name] = _with_smaller(parts[name], ()), set(names)
        nodes = (node for name in names for node in parts[name].subject.joint.nodes)
        if any(_torch.is_collective(node.target) for node in nodes):
            return {}  # ranks have batches of different sizes, and would communicate otherwise
        together = Together(self._steps, self._dynamo, self.lows, names)
        if len(names) == 1:
            found = [{names[0]: part} for part in self._alone(names[0], together)]
        else:
            found = together.plan()
        for name in names:
            parts[name] = _with_smaller(parts[name], tuple(one[name] for one in found))
        self._note_checked()
        return {name: parts[name].smaller or () for name in names}

    def _alone(self, name: str, together: Together) -> list[Part]:
        """Of the only graph of a step, the fastest first."""
        steps = self._steps
        part = steps.graphs.parts[name]
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
        found: list[Part] = []

        def plan_at(corner: Corner) -> float | None:
            before = _with_smaller(part, tuple(found)).for_call(corner.numbers)
            one = self._part_at(name, part, corner, budget_nbytes, recomputed_share(before.choice))
            if one is None or not together.fit({name: one}):
                return None
            found.append(one)
            found.sort(key=lambda one: recomputed_share(one.choice))
            return 1 + recomputed_share(one.choice)

        plan_parts(subject, plan, room_nbytes, lows, known, plan_at, worth=self._worth)
        return found

    @property
    def _worth(self) -> Worth:
        return WORTH[self._steps.options.setting.compiler]

    def _part_at(
        self, name: str, part: Part, corner: Corner, budget_nbytes: int, before: float
    ) -> Part | None:
        """A plan up to a corner; None if it is not proven, or no better than what recomputes so."""
        options, graph = self._steps.options, self._dynamo[name]
        assert part.covered is not None
        with graph.resumed():  # generated code may be read
            subject = stated_at(part.subject, corner.numbers, options.setting)
            subject = over_sizes(subject, self.lows.get(name, {}), options.setting)
            counted = part.planned.whole.counted
            beside = replace(subject, lowered=placed(subject.lowered, counted))
            choice = choose(beside, budget_nbytes, options.setting)
            known = covered(as_chosen(beside, choice), choice.solution.plan, part.covered.names)
        share = recomputed_share(choice)
        is_faster = 1 + share < (1 - self._worth.of(share)) * (1 + before)
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
            part,
            planned=planned,
            covered=known,
            shrunk=corner.shrunk,
            corner=corner.shrunk,
            smaller=(),
            _reports={},
        )

    def _keep_fitting(self, names: Sequence[str]) -> None:
        """Of graphs' further plans, those by which the step takes no more than it may."""
        parts = self._steps.graphs.parts
        plans = [part.planned for part in parts.values()]
        is_same = len(plans) == len(self._plans) and all(map(operator.is_, plans, self._plans))
        if is_same and not self._steps.surroundings.now.is_beyond(self._seen):
            return
        together = Together(self._steps, self._dynamo, self.lows, names)
        smaller = {name: parts[name].smaller or () for name in names}
        fitting = [
            number
            for number in range(max(map(len, smaller.values())))
            if together.fit({n: of[number] for n, of in smaller.items() if number < len(of)})
        ]
        for name, of_graph in smaller.items():
            if len(fitting) < len(of_graph):
                left = tuple(of_graph[number] for number in fitting)
                parts[name] = _with_smaller(parts[name], left)
        self._note_checked()

    def _note_checked(self) -> None:
        self._seen = self._steps.surroundings.now
        self._plans = [part.planned for part in self._steps.graphs.parts.values()]


def _with_smaller(part: Part, smaller: tuple[Part, ...]) -> Part:
    return replace(part, smaller=smaller, _reports={})
