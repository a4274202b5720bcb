"""Torch's own partition as a plan of our problem: what its two modules save and run again.

Enters: a lowered joint graph, and the forward and the backward module that torch made of it.
Leaves: a `TorchPlan`. Guarantees: its schedule is that of the modules' nodes, and the problem that
it is a plan of differs from ours in what torch does otherwise only; `check` accepts it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoremat_solver import Op, Plan, Problem, check
from autoremat_solver.simulate import saved_values
from torch import fx

from autoremat.emit.rewrite import value_name
from autoremat.graph.joint_graph import JointGraph
from autoremat.graph.storages import Storages
from autoremat.problem.lower import Lowered, with_buffers
from autoremat.problem.shell import Operations, in_order


@dataclass(frozen=True)
class TorchPlan:
    """What torch's modules do.

    Attributes:
        plan: their operations, forward then backward.
        buffers: nodes that torch saves and that we expected to be inlined.
        saved: values that the backward reads as the forward made them.
    """

    plan: Plan
    buffers: frozenset[fx.Node]
    saved: frozenset[str]

    def lowered(self, ours: Lowered, joint: JointGraph) -> Lowered:
        """The problem that the plan is one of: ours, with rules lifted that torch does not keep."""
        found = with_buffers(ours, joint, self.buffers) if self.buffers else ours
        return replace(found, graph=self._lifted(found.graph))

    def is_of(self, problem: Problem) -> bool:
        """Whether the plan keeps our rules too, so that our bounds hold for it."""
        return not self.buffers and not check(problem, self.plan)

    def _lifted(self, graph: Operations) -> Operations:
        again = self.plan.recomputed

        def lifted(ops: tuple[Op, ...]) -> tuple[Op, ...]:
            return tuple(replace(op, recomputable=True) if op.name in again else op for op in ops)

        values = {
            name: replace(
                value,
                must_save=value.must_save and name in self.saved,
                must_recompute=value.must_recompute and name not in self.saved,
            )
            for name, value in graph.values.items()
        }
        return replace(
            graph, forward=lifted(graph.forward), backward=lifted(graph.backward), values=values
        )


def torch_plan(
    joint: JointGraph, lowered: Lowered, forward: fx.GraphModule, backward: fx.GraphModule
) -> TorchPlan | None:
    """What the modules do; None where no plan says it, as with operators that torch put in."""
    storages = lowered.storages
    incoming = {name for node in joint.tangents for name in storages.of_node[node]}
    kept = handed_over(joint, storages, backward) - storages.resident - incoming
    buffers = frozenset(
        node
        for node in lowered.derived
        if node.op == "call_function" and not kept.isdisjoint(storages.made_by[node])
    )
    found = with_buffers(lowered, joint, buffers) if buffers else lowered
    plan = in_order(found.problem, *(_operations(found, module) for module in (forward, backward)))
    torchs = TorchPlan(plan, buffers, frozenset(kept))
    problem = torchs.lowered(lowered, joint).problem
    if check(problem, plan) or saved_values(problem, plan) - incoming != kept:
        return None
    return torchs


def handed_over(joint: JointGraph, storages: Storages, backward: fx.GraphModule) -> set[str]:
    """Names of the storages that a backward module is given."""
    inputs = {value_name(node.name) for node in backward.graph.find_nodes(op="placeholder")}
    given = (node for node in joint.nodes if node.name in inputs)
    return {name for node in given for name in storages.of_node[node]}


def _operations(lowered: Lowered, module: fx.GraphModule) -> list[str]:
    """The operations that a module runs, in their order."""
    nodes = (node for node in module.graph.nodes if node.op == "call_function")
    return [node.name for node in nodes if node.name in lowered.node_of]
