"""A step as one device runs it if its parameters are divided among several.

Enters: a stated graph, a plan of it, and what is resident beside it. Leaves: another problem, for
the same plan. Guarantees: what is counted is what the offline way of dividing counts: shares of
parameters, gradients and the optimizer's state, the `Window` of the model beside them, and each
matrix whole while it is read. Buffers are taken for parameters here, so that nothing is missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoremat_solver import Op
from torch import fx

from autoremat.explain.changed_step import Step
from autoremat.memory.residents import Resident
from autoremat.memory.window import Window
from autoremat.planning.figures import gradients_by_input
from autoremat.problem.shell import OPTIMIZER_STEP
from autoremat.problem.subject import Subject

DEVICES = 2


def spared_nbytes(resident: Resident) -> int:
    """Of what is resident, what the other devices hold."""
    parts = resident.parts
    divided = (parts.parameters_nbytes, parts.gradients_nbytes, parts.optimizer_nbytes)
    return sum(nbytes - _share(nbytes) for nbytes in divided)


def divided(subject: Subject, step: Step, resident: Resident, window: Window) -> Step:
    """The step of one device of those among which parameters are divided.

    Args:
        subject: the graph.
        step: the step to change.
        resident: what it holds whatever the plan.
        window: what is held whole.
    """
    reads = _WholeReads(subject)
    reduced = _reduced(subject)
    made = {value.name: value.nbytes for value in step.problem.values}

    def op_of(op: Op) -> Op:
        if op.name == OPTIMIZER_STEP:
            return replace(op, workspace_nbytes=_share(op.workspace_nbytes))
        more_nbytes = reads.nbytes(op.name)
        more_nbytes += sum(made[n] - _share(made[n]) for n in op.outputs if n in reduced)
        return replace(op, workspace_nbytes=op.workspace_nbytes + more_nbytes)

    problem = replace(
        step.problem,
        ops=tuple(map(op_of, step.problem.ops)),
        values=tuple(
            replace(value, nbytes=_share(value.nbytes)) if value.name in reduced else value
            for value in step.problem.values
        ),
        resident_nbytes=step.problem.resident_nbytes - spared_nbytes(resident) + window.nbytes,
    )
    return Step(problem, step.plan)


def _share(nbytes: int) -> int:
    return -(-nbytes // DEVICES)


def _reduced(subject: Subject) -> set[str]:
    """Storages of gradients of parameters."""
    storages, gradients = subject.lowered.storages, gradients_by_input(subject.joint)
    trained = (gradients[node] for node in subject.joint.static_inputs if node in gradients)
    return {name for node in trained for name in storages.of_node[node]} - storages.resident


class _WholeReads:
    """What each operation gathers: inputs that stay, read directly or through what is derived."""

    def __init__(self, subject: Subject) -> None:
        self._lowered = subject.lowered
        static = (subject.lowered.storages.of_node[n] for n in subject.joint.static_inputs)
        self._static = frozenset(name for names in static for name in names)

    def nbytes(self, op: str) -> int:
        """Bytes of them."""
        node = self._lowered.node_of.get(op)
        if node is None:
            return 0
        sizes = self._lowered.storages.nbytes
        return sum(sizes[name] for name in set(self._behind(node)))

    def _behind(self, node: fx.Node) -> Iterator[str]:
        for source in node.all_input_nodes:
            yield from self._static.intersection(self._lowered.storages.of_node[source])
            if source in self._lowered.derived:
                yield from self._behind(source)
