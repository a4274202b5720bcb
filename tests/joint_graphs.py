"""Tiny joint graphs, as AOTAutograd hands them to a partitioner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from autoremat_solver import Plan
from torch import Tensor, fx

from autoremat import _torch
from autoremat.ask.options import Setting
from autoremat.cost.calls import FREE
from autoremat.emit.op_by_op import compile_eager
from autoremat.graph.constraints import Constraints
from autoremat.graph.joint_graph import JointGraph, copy_module, prepare
from autoremat.graph.storages import Storages
from autoremat.planning.pipeline import Graph, graph_of, state
from autoremat.problem.lower import Lowered, shell_of
from autoremat.problem.subject import Subject

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Captured:
    """A joint graph as the partitioner gets it."""

    module: fx.GraphModule
    num_fwd_outputs: int
    static_indices: Sequence[int] | None

    def prepared(self) -> JointGraph:
        """The graph, cleaned and classified."""
        return prepare(
            self.module, num_fwd_outputs=self.num_fwd_outputs, static_indices=self.static_indices
        )


def capture(function: Callable[..., Any], *inputs: Any) -> Captured:
    """The joint graph of a function whose result needs a gradient."""
    torch._dynamo.reset()
    seen: list[Captured] = []

    def partition(module: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> Any:
        static = keywords.get("static_lifetime_input_indices")
        # A copy: the partition that follows tags its nodes.
        seen.append(Captured(copy_module(module), keywords["num_fwd_outputs"], static))
        return _torch.default_partition(module, joint_inputs, **keywords)

    backend = _torch.aot_autograd(
        fw_compiler=compile_eager,
        bw_compiler=compile_eager,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    torch.compile(function, backend=backend)(*inputs)
    return seen[0]


def _graph(function: Callable[..., Any], *inputs: Any) -> Graph:
    captured = capture(function, *inputs)
    return graph_of(
        captured.module,
        CPU,
        num_fwd_outputs=captured.num_fwd_outputs,
        static_indices=captured.static_indices,
    )


def subject_of(function: Callable[..., Any], given: Any, setting: Setting) -> Subject:
    """A function's graph, captured anew and stated for the solver."""
    graph = _graph(function, given)
    shell = shell_of(graph.joint, graph.storages, resident_nbytes=0)
    return state(graph, shell, setting)


@dataclass(frozen=True)
class Analysed:
    """A joint graph with everything that a plan needs; every operation takes one microsecond."""

    joint: JointGraph
    storages: Storages
    constraints: Constraints
    lowered: Lowered

    @property
    def schedule(self) -> tuple[str, ...]:
        """The order of a step without recompute."""
        return tuple(op.name for op in self.lowered.problem.ops)


def analyse(function: Callable[..., Any], *inputs: Any) -> Analysed:
    """Capture a function and take it as far as the solver's problem."""
    graph = _graph(function, *inputs)
    nodes = (node for node in graph.joint.nodes if node.op == "call_function")
    costs = {node: replace(FREE, time_us=1.0) for node in nodes}
    shell = shell_of(graph.joint, graph.storages, resident_nbytes=0)
    subject = state(graph, shell, Setting(compiler="eager"), costs=costs)
    return Analysed(graph.joint, graph.storages, subject.constraints, subject.lowered)


def plan(text: str) -> Plan:
    """A plan from names separated by blanks."""
    return Plan.of(text.split())


def drawn(module: fx.GraphModule) -> list[str]:
    """A graph as lines such as "mul = mul(sin, cos)"."""
    lines = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            continue
        names = ", ".join(str(a) for a in node.args) if node.op != "output" else ""
        if node.op == "output":
            lines.append("return " + ", ".join(str(a) for a in node.args[0]))
        else:
            target = getattr(node.target, "__name__", str(node.target)).split(".")[0]
            lines.append(f"{node.name} = {target}({names})")
    return lines


def leaf(*shape: int) -> Tensor:
    """An input that needs a gradient."""
    return torch.ones(*shape, requires_grad=True)
