"""A model's step as a GPU would run it: without a plan, and by plans.

Enters: a model, a batch and a GPU. Leaves: the code of each plan with what was read of it, as
values that a file can keep. Everything is made as `autoremat.plan` makes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from autoremat_solver import Plan
from torch import Tensor, fx, nn

from autoremat import _torch
from autoremat.ask.options import Offline
from autoremat.inductor.reading import code_of, reading_of
from autoremat.offline import OfflineStep, asked, planned_session
from autoremat.planning.torch_own import Unplanned
from autoremat.problem.subject import Subject
from tests.elsewhere.executed.dropout import drop_by

Batch = tuple[Tensor, ...]
Modules = tuple[fx.GraphModule, fx.GraphModule]


@dataclass(frozen=True)
class Wrapper:
    """Generated code of one module.

    Attributes:
        source: of the wrapper.
        inputs: their names, in order.
        results: their names, in order; None for what is no tensor.
    """

    source: str
    inputs: tuple[str, ...]
    results: tuple[str | None, ...]


@dataclass(frozen=True)
class Program:
    """One plan of a step, in generated code.

    Attributes:
        name: of the plan.
        forward: its results are the graph's outputs, then what is saved.
        backward: its results are gradients of the graph's inputs, in their order.
        inputs: names of the graph's inputs, in order.
        outputs: how many the forward has.
        tangent: name of the loss's gradient.
        peak_nbytes: that was read of the code, above what is resident.
        events: that were read of it: pairs of a block and its bytes, 0 where it is freed.
    """

    name: str
    forward: Wrapper
    backward: Wrapper
    inputs: tuple[str, ...]
    outputs: int
    tangent: str
    peak_nbytes: int
    events: tuple[tuple[int, int], ...]


class Step:
    """A model's step on a GPU, stated.

    Attributes:
        subject: its graph.
        eager: the same step, op by op.
        plan: of the step.
    """

    def __init__(self, model: nn.Module, batch: Batch, device: str, **asked_for: Any) -> None:
        given = dict.fromkeys(("budget", "save", "recompute", "repeatable")) | {
            "compiler": "inductor",
            "policy": "recompute-all",
            "time_limit": 4.0,
            "verbose": False,
            **asked_for,
        }
        home, options = asked(model, device, None, **given)
        step = OfflineStep(model, (batch, {}), None, home, Offline(0, 0.0))
        (part,) = planned_session(options, step).steps.graphs.parts.values()
        self.subject: Subject = part.subject
        self.plan: Plan = part.choice.solution.plan
        self._lean = (part.choice.forward, part.choice.backward)
        self.eager = in_eager(model, batch)
        shapes = [_torch.fake_value(node).shape for node in self.subject.joint.primals]
        assert [v.shape for v in self.eager.values] == shapes, "the inputs have another order"

    def programs(self) -> Iterator[Program]:
        """Torch's own partition, without a budget, and the plan that was asked for."""
        own = Unplanned(self.subject).own
        assert own is not None
        yield self._program("no budget", (own.forward, own.backward))
        yield self._program("planned", self._lean)

    def _program(self, name: str, modules: Modules) -> Program:
        code = code_of(self.subject, *modules)
        reading = reading_of(self.subject, modules[1], code)
        joint, found = self.subject.joint, reading.asked
        (tangent,) = joint.tangents
        assert found is not None
        return Program(
            name,
            _wrapper(code.forward.source, modules[0]),
            _wrapper(code.backward.source, modules[1]),
            inputs=tuple(node.name for node in joint.primals),
            outputs=joint.num_fwd_outputs,
            tangent=tangent.name,
            peak_nbytes=reading.peak_nbytes - self.subject.lowered.shell.resident_nbytes,
            events=tuple((block, n) for block, n in (*found.forward, *found.backward)),
        )


def _wrapper(source: str, module: fx.GraphModule) -> Wrapper:
    results = _torch.arg_tree_leaves(*module.graph.output_node().args)
    return Wrapper(
        source,
        tuple(node.name for node in module.graph.find_nodes(op="placeholder")),
        tuple(node.name if isinstance(node, fx.Node) else None for node in results),
    )


@dataclass(frozen=True)
class Eager:
    """A step op by op, on the CPU.

    Attributes:
        values: of the graph's inputs, in its order, before the step.
        after: of the same, as the step leaves them.
        gradients: of the same; None for those without.
        loss: of the step.
    """

    values: list[Tensor]
    after: list[Tensor]
    gradients: list[Tensor | None]
    loss: Tensor


def in_eager(model: nn.Module, batch: Batch, saved: Sequence[Tensor] = ()) -> Eager:
    """One step of a model as Dynamo's graph sees it; dropout by masks among those saved."""
    model.zero_grad()
    seen: list[Tensor] = []
    values: list[Tensor] = []

    def backend(module: Any, _: Any) -> Any:
        if saved:
            drop_by(module, saved)

        def call(*given: Tensor) -> Any:
            seen.extend(given)
            values.extend(value.detach().clone() for value in given)
            return module(*given)

        return call

    torch._dynamo.reset()
    loss = torch.compile(model, backend=backend)(*batch)
    loss.backward()
    after = [value.detach().clone() for value in seen]
    return Eager(values, after, [value.grad for value in seen], loss.detach())
