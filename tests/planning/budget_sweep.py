"""One compile, many budgets: the planned modules of a small model, run by hand.

Dynamo and AOTAutograd take most of the time of a tiny step. So a model is compiled once, and the
graph that the session gets is then planned, written out and run for each budget asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from autoremat_solver import Solver
from torch import Tensor, fx

import autoremat.planning.pipeline
import autoremat.session.capturing
from autoremat import _torch
from autoremat.emit.op_by_op import compile_eager
from autoremat.memory.meter import measure_peak
from autoremat.planning.choice import Choice
from autoremat.planning.found_before import FoundBefore
from autoremat.planning.simulated import choose_by_simulation
from autoremat.problem.lower import held_tangents
from autoremat.problem.subject import Subject
from tests.training import UNBOUNDED, Make, Outcome, optimized, step

SOLVE_S = 0.15  # any plan will do: it has to be right, not good


@dataclass(frozen=True)
class Planned:
    """A model's graph as the session plans it, and what its forward is called with."""

    subject: Subject
    solver: Solver
    arguments: tuple[Any, ...]

    @cached_property
    def ends(self) -> tuple[int, int]:
        """The smallest peak that the solver knows and that of the fastest plan, in bytes."""
        found = (self.solver.smallest_peak(), self.solver.fastest())
        smallest, highest = (solution.timeline.peak_nbytes for solution in found)
        return smallest, highest

    def at(self, share: float) -> int:
        """A budget between the smallest peak (0.0) and the peak of the fastest plan (1.0)."""
        smallest, highest = self.ends
        return smallest + int(share * (highest - smallest))

    def choose(self, budget: int) -> Choice:
        """The plan for a budget, written out."""
        return choose_by_simulation(self.subject, self.solver, budget)

    def run(self, choice: Choice) -> list[Any]:
        """Outputs, gradients and inputs as a step leaves them, from a fixed seed."""
        arguments = self._copies()
        torch.manual_seed(0)
        return [*self._step(choice, arguments), *arguments]

    def measured(self, choice: Choice) -> int:
        """Measured peak in bytes, resident bytes included."""
        arguments = self._copies()
        above = measure_peak(lambda: self._step(choice, arguments), device="cpu")
        return self.subject.lowered.problem.resident_nbytes + above

    def _copies(self) -> tuple[Any, ...]:
        return tuple(a.clone() if isinstance(a, Tensor) else a for a in self.arguments)

    def _step(self, choice: Choice, arguments: Sequence[Any]) -> list[Any]:
        """Forward and backward as AOTAutograd calls them; the outputs' gradients are made here."""
        count = self.subject.joint.num_fwd_outputs
        results = list(compile_eager(choice.forward, ())(list(arguments)))
        saved_nodes = choice.forward.graph.output_node().args[0][count:]
        saved = {node.name: value for node, value in zip(saved_nodes, results[count:], strict=True)}
        del results[count:]
        lowered = self.subject.lowered
        held_nodes = held_tangents(self.subject.joint, lowered.storages)
        held, incoming = [], []
        for node in choice.backward.graph.find_nodes(op="placeholder"):
            if node.name in saved:
                incoming.append(saved.pop(node.name))
                continue
            incoming.append(_gradient(node))
            if node.name in {tangent.name for tangent in held_nodes}:
                held.append(incoming[-1])
        assert not saved
        return [*results, *compile_eager(choice.backward, ())(incoming)]


def _gradient(node: fx.Node) -> Tensor:
    """A gradient of an output, the same for every plan."""
    value = node.meta["val"]
    made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
    return made.copy_(torch.linspace(-1, 2, made.numel(), dtype=made.dtype).view(made.shape))


def sweep(
    make: Make, inputs: Sequence[Any], loss_of: Callable[[Any], Tensor]
) -> tuple[Planned, Outcome]:
    """Take one step without a budget; returns what was planned, and what the step did."""
    subjects: list[tuple[Subject, Solver]] = []
    arguments: list[tuple[Any, ...]] = []

    def choose(subject: Subject, solver: Solver, budget: int) -> Choice:
        solver.time_limit_s = SOLVE_S
        subjects.append((subject, solver))
        return choose_by_simulation(subject, solver, budget)

    def compile_recording(module: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        compiled = compile_eager(module, example_inputs)
        is_forward = all(map(_torch.is_primal, module.graph.find_nodes(op="placeholder")))

        def run(given: list[Any]) -> Any:
            if is_forward and not arguments:
                arguments.append(
                    tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in given)
                )
            return compiled(given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    FoundBefore.remove()  # a module may come twice in a test
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autoremat.planning.pipeline, "choose_by_simulation", choose)
        patch.setattr(autoremat.session.capturing, "compile_eager", compile_recording)
        outcome = step(optimized(make, UNBOUNDED, time_limit=1.0), inputs, loss_of)
    ((subject, solver),) = subjects
    return Planned(subject, solver, arguments[0]), outcome
