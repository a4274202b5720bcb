"""A step under a plan that was made for it as it was traced before.

Enters: two states of one graph, and a plan of the first. Leaves: the plan of the second that runs
the same operations in the same order. Guarantees: it is a plan that could run, so that its peak is
a bound of what the step takes: whatever only the second graph has, such as the casts that autocast
inserts, runs when it is first read, and again when what it is made of was made again.
"""

from __future__ import annotations

import difflib

from autoremat_solver import Op, Phase, Plan, Problem
from torch import fx

from autoremat.explain.changed_step import CannotChange, Step
from autoremat.explain.places import op_name
from autoremat.graph.joint_graph import JointGraph
from autoremat.graph.modules import module_path
from autoremat.problem.lower import without_spare_states
from autoremat.problem.shell import MARKERS
from autoremat.problem.subject import Subject

_CASTS = frozenset({"_to_copy", "convert_element_type"})
_KNOWN = 0.8  # of the operations, at least: else it is another graph


def under_same_plan(before: Subject, plan: Plan, after: Subject) -> Step:
    """The step of the second graph: what the forward has cast waits for the backward.

    Args:
        before: the graph that the plan is of.
        plan: of the operations that run, without values that wait elsewhere.
        after: the graph as it is traced now.

    Raises:
        CannotChange: if the two have too little in common.
    """
    same = {old.name: new.name for old, new in images(before.joint, after.joint)}
    problem = after.lowered.problem
    schedule = [same.get(name, name if name in MARKERS else "") for name in plan.schedule]
    known = problem.op_by_name.keys()
    schedule = [name for name in schedule if name in known]
    plan = Plan.of(_Follower(problem, frozenset(schedule)).follow(schedule))
    return Step(without_spare_states(problem, plan), plan)


def images(before: JointGraph, after: JointGraph) -> list[tuple[fx.Node, fx.Node]]:
    """Each operation of the first graph, and the same one in the second; casts are left out.

    Raises:
        CannotChange: if the two have too little in common.
    """
    old, new = (list(filter(_is_compared, joint.nodes)) for joint in (before, after))
    matcher = difflib.SequenceMatcher(None, [*map(_key, old)], [*map(_key, new)], autojunk=False)
    blocks = matcher.get_matching_blocks()
    found = [(old[block.a + n], new[block.b + n]) for block in blocks for n in range(block.size)]
    if len(found) < _KNOWN * max(len(old), len(new)):
        raise CannotChange("traced again, the graph is another one")
    return found


def is_cast(node: fx.Node) -> bool:
    """Whether a node does nothing but change a type, or a place."""
    return node.op == "call_function" and _key(node)[0] in _CASTS


def _is_compared(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_cast(node)


def _key(node: fx.Node) -> tuple[str, str]:
    """Its operator, in whichever overload, and the module that it is in."""
    return op_name(node).split(".")[0], module_path(node)


class _Follower:
    """Runs a schedule of some operations, and the others as these need them."""

    def __init__(self, problem: Problem, scheduled: frozenset[str]) -> None:
        """Of a problem, and those of its operations that somebody else gives the order of."""
        self._problem, self._scheduled = problem, scheduled
        self._ran: dict[str, int] = {}  # by operation, the number of its latest run
        self._steps: list[str] = []
        self._readers: dict[str, list[Op]] = {}
        for op in problem.ops:
            for name in op.inputs:
                self._readers.setdefault(name, []).append(op)
        self._ends = self._found_ends()

    def follow(self, schedule: list[str]) -> list[str]:
        """The whole schedule."""
        early: set[str] = set()
        for name in schedule:
            if name in early:
                early.discard(name)  # something had to read it before
                continue
            before = len(self._steps)
            self._run(self._problem.op_by_name[name])
            early.update(set(self._steps[before:]) & self._scheduled - {name})
        for op in self._problem.ops:
            if op.name not in self._ran and op.phase is not Phase.EITHER:
                self._run(op)
        return self._steps

    def _found_ends(self) -> frozenset[str]:
        """Operations of ours that none of the schedule waits for: casts of finished gradients."""
        ends: set[str] = set()
        for op in reversed(self._problem.ops):
            readers = (r.name for name in op.outputs for r in self._readers.get(name, ()))
            if op.name not in self._scheduled and ends.issuperset(readers):
                ends.add(op.name)
        return frozenset(ends)

    def _run(self, op: Op) -> None:
        for name in op.inputs:
            self._make(self._problem.producer_of[name])
        self._ran[op.name] = len(self._steps)
        self._steps.append(op.name)
        for name in op.outputs:
            for reader in self._readers.get(name, ()):
                is_next = reader.name in self._ends and reader.name not in self._ran
                if is_next and all(self._is_made(n) for n in reader.inputs):
                    self._run(reader)

    def _is_made(self, value: str) -> bool:
        return self._problem.producer_of[value].name in self._ran

    def _make(self, op: Op) -> None:
        """Have what an operation makes, if it is not there or is of an earlier run."""
        latest = self._ran.get(op.name)
        if latest is None:
            self._run(op)
            return
        if op.name in self._scheduled or not op.recomputable or op.phase is Phase.BACKWARD:
            return
        for name in op.inputs:
            self._make(self._problem.producer_of[name])
        sources = (self._problem.producer_of[name].name for name in op.inputs)
        if any(self._ran[source] > latest for source in sources):
            self._run(op)
