"""The graphs of one step, side by side: what each leaves the others of one budget.

Enters: each graph as it was planned, in the order in which the step runs them. Leaves: what is
held while another one runs and, where they do not fit together, the `Split` under which the step
is planned anew. Guarantees: what two graphs share counts once; an incomplete step has no split.

A later graph runs between the forward and the backward of an earlier one:

    forward 0, forward 1, forward 2, backward 2, backward 1, backward 0

While it runs, the earlier ones hold what crosses from their forward to their backward; while the
backward of an earlier one runs, the gradients are there that the later ones have returned. When the
first graph is planned, Dynamo has not traced the others yet. It takes the whole budget, and the
others may find too little. Only after a whole forward is it known how to share.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from autoremat_solver import Plan, Problem, simulate
from autoremat_solver.plan_document import without_recompute
from autoremat_solver.policies import recompute_all
from torch import fx

from autoremat import _torch
from autoremat.capture import JointGraph
from autoremat.choose import Choice, Subject
from autoremat.lower import LOSS_BOUNDARY, Lowered, with_later_graphs
from autoremat.plan_file import StoredGraph
from autoremat.reporting import CurvePoint, GraphReport


@dataclass(frozen=True)
class Split:
    """How the graphs of a step share its budget.

    Attributes:
        share: of what a graph could keep for its backward beyond the least that it must keep, how
            much it may keep. One number for all graphs, whatever the sizes of the batch.
        graphs: signature of each graph: of another one, nothing is known.
        gradients_nbytes: by the number of a graph, what the backwards of later ones return.
    """

    share: float = 1.0
    graphs: tuple[int, ...] = ()
    gradients_nbytes: tuple[int, ...] = ()

    def knows(self, joint: JointGraph, number: int) -> bool:
        """Whether the graph is the one that had this number.

        Code that does something at its first call only has other graphs at the second.
        """
        return self.graphs[number : number + 1] == (_signature(joint),)

    def gradients_after(self, joint: JointGraph, number: int, existing_nbytes: int) -> int:
        """Gradients that graphs after one return, beyond those that exist already."""
        if not self.knows(joint, number):
            return 0
        return max(0, self.gradients_nbytes[number] - existing_nbytes)

    def place(
        self, subject: Subject, number: int, budget_nbytes: int, existing_nbytes: int
    ) -> Subject:
        """A graph with what later ones take from the budget, as far as that is known.

        Args:
            subject: the graph alone.
            number: how many graphs of the step come before it.
            budget_nbytes: of the whole step.
            existing_nbytes: gradients that exist already and are resident.
        """
        lowered = subject.lowered
        if number + 1 >= len(self.graphs) or not self.knows(subject.joint, number):
            return subject
        least_nbytes, most_nbytes = _crossings(lowered.problem)
        crossing_nbytes = least_nbytes + int(self.share * (most_nbytes - least_nbytes))
        room_nbytes = budget_nbytes - lowered.problem.resident_nbytes - crossing_nbytes
        gradients_nbytes = self.gradients_after(subject.joint, number, existing_nbytes)
        placed = with_later_graphs(
            lowered, gradients_nbytes=gradients_nbytes, room_nbytes=max(0, room_nbytes)
        )
        return replace(subject, lowered=placed)


ALONE = Split()
"""Nothing is known of later graphs."""


@dataclass(frozen=True)
class Part:
    """One planned graph of the step.

    Attributes:
        subject: the graph, alone in the step.
        choice: its plan.
        counted_gradients_nbytes: gradients of later graphs that the choice's peak counts.
        explain: its report, given a subject and a choice of it.
        stored: what a file keeps of the plan.
        curve: peaks and times of other plans.
        resident_nbytes: live during the whole step, whatever the plans.
        between_nbytes: what code between the graphs holds while this one runs.
    """

    subject: Subject
    choice: Choice
    counted_gradients_nbytes: int
    explain: Callable[[Subject, Choice], GraphReport]
    stored: StoredGraph
    curve: tuple[CurvePoint, ...]
    resident_nbytes: int
    between_nbytes: int
    _reports: dict[int, GraphReport] = field(default_factory=dict)

    @functools.cached_property
    def crossing_nbytes(self) -> int:
        """Bytes that live from the forward's end to the backward's start."""
        joint, storages = self.subject.joint, self.subject.lowered.storages
        names = {node.name for node in self.choice.backward.graph.find_nodes(op="placeholder")}
        saved = {node for node in joint.nodes if node.name in names} - set(joint.tangents)
        return storages.total_nbytes(saved | set(joint.fwd_outputs))

    @property
    def outputs_nbytes(self) -> int:
        """Of them, what the graph returned to the user's code."""
        return self.subject.lowered.storages.total_nbytes(self.subject.joint.fwd_outputs)

    @functools.cached_property
    def gradients_nbytes(self) -> int:
        """Gradients of parameters that its backward returns: they stay until the step's end."""
        joint = self.subject.joint
        returned = _gradients_by_input(joint)
        gradients = [returned[node] for node in joint.static_inputs if node in returned]
        return self.subject.lowered.storages.total_nbytes(gradients)

    def report(self, later_gradients_nbytes: int) -> GraphReport:
        """The graph's report, later graphs' gradients being live in its backward."""
        if later_gradients_nbytes not in self._reports:
            lowered = self._beside(later_gradients_nbytes)
            peak_nbytes = self._peak_nbytes(later_gradients_nbytes)
            subject = replace(self.subject, lowered=lowered)
            found = self.explain(subject, replace(self.choice, peak_nbytes=peak_nbytes))
            self._reports.clear()
            self._reports[later_gradients_nbytes] = found
        return self._reports[later_gradients_nbytes]

    def _peak_nbytes(self, later_gradients_nbytes: int) -> int:
        """The real peak beside other gradients than the choice counts."""
        if later_gradients_nbytes == self.counted_gradients_nbytes:
            return self.choice.peak_nbytes
        plan = self.choice.solution.plan
        counted, wanted = (
            simulate(self._beside(nbytes).problem, plan).peak_nbytes
            for nbytes in (self.counted_gradients_nbytes, later_gradients_nbytes)
        )
        return self.choice.peak_nbytes + wanted - counted

    def _beside(self, later_gradients_nbytes: int) -> Lowered:
        return with_later_graphs(self.subject.lowered, gradients_nbytes=later_gradients_nbytes)


@dataclass
class Step:
    """The graphs that were planned so far, by the names of their frames."""

    parts: dict[str, Part] = field(default_factory=dict)

    def earlier(self, name: str) -> list[Part]:
        """Graphs of the step before this one; a recompile takes its old place."""
        names = itertools.takewhile(lambda other: other != name, list(self.parts))
        return [self.parts[other] for other in names]

    def reports(self, existing_gradients_nbytes: int) -> Iterator[GraphReport]:
        """Of every graph, in the order of the step.

        Args:
            existing_gradients_nbytes: gradients that exist already and are resident: what later
                graphs return is added to them.
        """
        parts = list(self.parts.values())
        for number, part in enumerate(parts, 1):
            later_nbytes = sum(later.gradients_nbytes for later in parts[number:])
            yield part.report(max(0, later_nbytes - existing_gradients_nbytes))

    def split(self, budget_nbytes: int) -> Split:
        """How the graphs can share the budget, each as well as the others.

        A graph's needs lie between those of the leanest plan known and those of running without
        recompute, and so does what crosses: all go the same share of the way, the largest at which
        each graph fits beside what the earlier ones keep.
        """
        parts = list(self.parts.values())
        gradients = [part.gradients_nbytes for part in parts]
        later = tuple(sum(gradients[number + 1 :]) for number in range(len(parts)))
        crossings = [_crossings(part.subject.lowered.problem) for part in parts]
        share = 1.0
        for number, part in enumerate(parts):
            before = crossings[:number]
            held_nbytes = part.resident_nbytes + part.between_nbytes + sum(c[0] for c in before)
            lean_nbytes, most_nbytes = _own_peaks(part)
            free_nbytes = budget_nbytes - held_nbytes - lean_nbytes - later[number]
            wanted_nbytes = most_nbytes - lean_nbytes + sum(most - least for least, most in before)
            if before and wanted_nbytes > free_nbytes:
                share = min(share, max(0.0, free_nbytes / wanted_nbytes))
        return Split(share, tuple(_signature(part.subject.joint) for part in parts), later)

    def follows(self, split: Split) -> bool:
        """Whether the graphs are those that the split was made for."""
        numbered = enumerate(self.parts.values())
        return all(split.knows(part.subject.joint, number) for number, part in numbered)


def _signature(joint: JointGraph) -> int:
    """Equal for graphs of the same operations, whatever the sizes of their tensors."""
    targets = (node.target for node in joint.nodes)
    return hash(tuple(str(t) for t in targets if isinstance(t, _torch.OpOverload)))


def _crossings(problem: Problem) -> tuple[int, int]:
    """What crosses to the backward at least, and where nothing is recomputed."""
    as_written = Plan(tuple(op.name for op in problem.ops))
    least_nbytes, most_nbytes = (
        _crossing_nbytes(problem, plan) for plan in (recompute_all(problem), as_written)
    )
    return min(least_nbytes, most_nbytes), most_nbytes


def _crossing_nbytes(problem: Problem, plan: Plan) -> int:
    """Bytes that live between the forward and the backward of a plan."""
    boundary = problem.op_by_name[LOSS_BOUNDARY]
    own = boundary.workspace_nbytes + sum(problem.value_by_name[n].nbytes for n in boundary.outputs)
    live_nbytes = simulate(problem, plan).live_nbytes[plan.schedule.index(LOSS_BOUNDARY)]
    return live_nbytes - own - problem.resident_nbytes


def _own_peaks(part: Part) -> tuple[int, int]:
    """Peak above what it found live: under its present plan, and without recompute."""
    problem = part.subject.lowered.problem
    lean_nbytes = part.choice.peak_nbytes - problem.resident_nbytes
    most_nbytes = without_recompute(problem).peak_nbytes - problem.resident_nbytes
    return lean_nbytes, max(lean_nbytes, most_nbytes)


def _gradients_by_input(joint: JointGraph) -> dict[fx.Node, fx.Node]:
    """What the backward returns for each input of the forward."""
    results: Sequence[object] = _torch.arg_tree_leaves(*joint.module.graph.output_node().args)
    gradients = results[joint.num_fwd_outputs :]
    pairs = zip(joint.primals, gradients, strict=False)  # effect tokens follow
    return {node: gradient for node, gradient in pairs if isinstance(gradient, fx.Node)}
