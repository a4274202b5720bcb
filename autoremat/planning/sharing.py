"""How the graphs of a step share its budget.

Enters: what each graph must keep and could keep for its backward. Leaves: a `Split`, and graphs
placed beside the others. Guarantees: of graphs that are not those that a split was made for,
nothing is taken as known: how to share is known only after a whole forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoremat_solver import Plan, Problem, simulate
from autoremat_solver.policies import recompute_all

from autoremat import _torch
from autoremat.graph.joint_graph import JointGraph
from autoremat.planning.nesting import Beside, beside, placed
from autoremat.planning.part import Part
from autoremat.problem.lower import as_written
from autoremat.problem.shell import LOSS_BOUNDARY
from autoremat.problem.subject import Subject


@dataclass(frozen=True)
class Split:
    """How the graphs of a step share its budget. Without any graph, nothing is known of it.

    Attributes:
        share: of what a graph could keep for its backward beyond the least that it must keep, how
            much it may keep. One number for all graphs, whatever the sizes of the batch.
        graphs: signature of each graph.
        order: the number of each run: of its graph, or beyond those of a layer in eager mode.
        crossing_nbytes: by number, what the share gave a graph when the split was made.
        gradient_nbytes: by number, gradients of parameters that a graph's backward returns.
    """

    share: float = 1.0
    graphs: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    crossing_nbytes: tuple[int, ...] = ()
    gradient_nbytes: tuple[int, ...] = ()

    def knows(self, joint: JointGraph, number: int) -> bool:
        """Whether the graph is the one that had this number.

        Code that does something at its first call only has other graphs at the second.
        """
        return self.graphs[number : number + 1] == (signature(joint),)

    def beside(self, subject: Subject, earlier: Sequence[Part], held_nbytes: int) -> Beside:
        """What is held beside a graph that is being planned.

        Args:
            subject: the graph alone.
            earlier: the graphs that ran before it.
            held_nbytes: what crosses their forwards and backwards.
        """
        number = len(earlier)
        if not self.knows(subject.joint, number):
            return Beside(held_nbytes)
        planned = [part.crossing_nbytes for part in earlier]
        own = self._crossing_nbytes(subject)
        crossing = [*planned, own, *self.crossing_nbytes[number + 1 :]]
        return beside(self.order, number, crossing, self.gradient_nbytes)

    def place(
        self,
        subject: Subject,
        number: int,
        found: Beside,
        budget_nbytes: int,
        *,
        eager_nbytes: int = 0,
    ) -> Subject:
        """A graph with what the others take from the budget, as far as that is known.

        Args:
            subject: the graph alone.
            number: how many graphs of the step come before it.
            found: what is held beside it.
            budget_nbytes: of the whole step.
            eager_nbytes: what code in eager mode takes between its forward and backward.
        """
        room_nbytes = eager_nbytes
        is_last = self.order[-1:] == (number,) and self.order.count(number) == 1
        if self.knows(subject.joint, number) and not is_last:
            taken = subject.lowered.shell.resident_nbytes + found.held_nbytes
            own_nbytes = self._crossing_nbytes(subject)
            room_nbytes = max(room_nbytes, budget_nbytes - taken - own_nbytes)
        return replace(subject, lowered=placed(subject.lowered, found, room_nbytes))

    def _crossing_nbytes(self, subject: Subject) -> int:
        least_nbytes, most_nbytes = crossing_range(subject.lowered.problem)
        return least_nbytes + int(self.share * (most_nbytes - least_nbytes))


ALONE = Split()


def signature(joint: JointGraph) -> int:
    """Equal for graphs of the same operations, whatever the sizes of their tensors."""
    targets = (node.target for node in joint.nodes)
    return hash(tuple(str(t) for t in targets if isinstance(t, _torch.OpOverload)))


def crossing_range(problem: Problem) -> tuple[int, int]:
    """What crosses to the backward at least, and where nothing is recomputed."""
    least_nbytes, most_nbytes = (
        _crossing_nbytes(problem, plan) for plan in (recompute_all(problem), as_written(problem))
    )
    return min(least_nbytes, most_nbytes), most_nbytes


def _crossing_nbytes(problem: Problem, plan: Plan) -> int:
    """Bytes that live between the forward and the backward of a plan."""
    boundary = problem.op_by_name[LOSS_BOUNDARY]
    own = boundary.workspace_nbytes + sum(problem.value_by_name[n].nbytes for n in boundary.outputs)
    live_nbytes = simulate(problem, plan).live_nbytes[plan.schedule.index(LOSS_BOUNDARY)]
    return live_nbytes - own - problem.resident_nbytes
