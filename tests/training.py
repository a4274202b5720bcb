"""One training step of a tiny model, under a budget and without one, and how to compare them.

`peaks` finds what a model's budgets may be: the peak of the plan that saves everything, and the
smallest one. `gradients_hold` is the correctness promise in one call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autoremat
from autoremat.memory.meter import measure_peak, resident_nbytes

UNBOUNDED = 1 << 50

Make = Callable[[], nn.Module]
Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Outcome:
    """What a training step leaves behind."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]
    """Buffers, and inputs as the step leaves them."""


@dataclass(frozen=True)
class Peaks:
    """Peaks in bytes, resident bytes included."""

    smallest: int
    save_all: int
    resident: int

    def at(self, share: float) -> int:
        """A budget between the smallest peak (0.0) and the peak without recompute (1.0)."""
        return self.smallest + int(share * (self.save_all - self.smallest))


def make_seeded(make: Make) -> nn.Module:
    """A model in train mode with the same parameters each time."""
    torch.manual_seed(0)
    return make().train()


def optimized(make: Make, budget: str | int, **options: Any) -> nn.Module:
    """A seeded model under a budget: op by op, strict and silent unless the test says otherwise."""
    torch._dynamo.reset()
    given = {"compiler": "eager", "strict": True, "verbose": False, "time_limit": 4.0} | options
    return autoremat.optimize(make_seeded(make), budget, **given)


def scalar(output: Any) -> Tensor:
    """The output itself if it is a loss, else the mean square of all that needs a gradient."""
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([leaf.abs().square().mean() for leaf in leaves]).sum()


def step(model: nn.Module, inputs: Sequence[Any], loss_of: Loss = scalar, seed: int = 0) -> Outcome:
    """Forward and backward on copies of the inputs, from no gradients and a fixed seed."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    inputs = [copied(value) for value in inputs]
    loss = loss_of(model(*inputs))
    loss.backward()
    gradients = {name: _dense(p.grad) for name, p in model.named_parameters()}
    state = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    for position, value in enumerate(inputs):
        if isinstance(value, Tensor):
            state[f"input {position}"] = value.detach().clone()
            gradients[f"input {position}"] = value.grad
    return Outcome(loss.detach().clone(), gradients, state)


def copied(value: Any) -> Any:
    """The same input in memory of its own."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _dense(gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    return gradient.to_dense() if gradient.is_sparse else gradient.clone()


def measured(model: nn.Module, inputs: Sequence[Any], loss_of: Loss = scalar) -> int:
    """Measured peak of one step in bytes, resident bytes and the held output included."""
    model.zero_grad(set_to_none=True)
    inputs = [copied(value) for value in inputs]
    held = []

    def run() -> None:
        held.append(model(*inputs))
        loss_of(held[0]).backward()

    resident = resident_nbytes(model, inputs)
    return resident + measure_peak(run, device="cpu")


def told(call: Callable[[], object]) -> list[autoremat.OverBudgetWarning]:
    """What is said of the budget during a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", autoremat.OverBudgetWarning)
        call()
    return [w.message for w in caught if isinstance(w.message, autoremat.OverBudgetWarning)]


def refusal(
    make: Make, inputs: Sequence[Any], budget: int | None = None, **options: Any
) -> autoremat.InfeasibleBudget:
    """The error of a budget that no plan fits: of what is resident, if none is given.

    Below that nothing would be searched for.
    """
    if budget is None:
        budget = resident_nbytes(make_seeded(make), inputs)
    model = optimized(make, budget, **options)
    with pytest.raises(autoremat.InfeasibleBudget) as caught:
        step(model, inputs, options.get("loss_of", scalar))
    return caught.value


def unbounded(make: Make, inputs: Sequence[Any], **options: Any) -> autoremat.Report:
    """The report of a step without recompute."""
    model = optimized(make, UNBOUNDED, **options)
    step(model, inputs)
    return autoremat.report(model)


def peaks(make: Make, inputs: Sequence[Any], **options: Any) -> Peaks:
    """The range of a model's budgets; where one end is enough, the other is not searched for."""
    report = unbounded(make, inputs, **options)
    smallest = refusal(make, inputs, **options).smallest_peak_nbytes
    return Peaks(smallest, report.predicted_peak_nbytes, report.resident_nbytes)


def same(one: Outcome, other: Outcome) -> None:
    """Fail unless two outcomes are equal bit for bit."""
    assert torch.equal(one.loss, other.loss), "the losses differ"
    for kind, a, b in (
        ("gradient", one.gradients, other.gradients),
        ("state", one.state, other.state),
    ):
        assert a.keys() == b.keys()
        for name in a:
            mine, theirs = a[name], b[name]
            assert (mine is None) == (theirs is None), f"{kind} of {name} is missing"
            if mine is not None and theirs is not None:
                assert torch.equal(mine, theirs), f"{kind} of {name} differs"


def close(one: Outcome, other: Outcome, tolerance: float) -> None:
    """Fail unless errors are within a tolerance, relative to the largest gradient or buffer.

    No gradient counts as zeros: eager mode leaves None where the loss does not read what a
    parameter made, and torch passes zeros into a compiled graph that returns such a value.
    """
    assert torch.allclose(one.loss, other.loss, rtol=tolerance, atol=tolerance)
    for kind, a, b in (
        ("gradient", one.gradients, other.gradients),
        ("state", one.state, other.state),
    ):
        scale = max((_largest(t) for t in a.values() if t is not None), default=1.0) or 1.0
        for name in a:
            mine, theirs = a[name], b[name]
            known = mine if mine is not None else theirs
            if known is not None:
                none = torch.zeros_like(known)
                difference = (none if mine is None else mine) - (none if theirs is None else theirs)
                error = _largest(difference) / scale
                assert error <= tolerance, f"{kind} of {name} is off by {error:.1e}"


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().double().max()) if tensor.numel() else 0.0


def gradients_hold(
    make: Make,
    inputs: Sequence[Any],
    *,
    tolerance: float = 1e-5,
    shares: Sequence[float] = (0.0,),
    loss_of: Loss = scalar,
    against_eager: bool = True,
    **options: Any,
) -> Peaks:
    """Check that no budget changes the step: bitwise against the plan without recompute.

    Against eager mode it is compared within a tolerance. The smallest budget is always among
    those tried. Returns the range of budgets.
    """
    unbounded = optimized(make, UNBOUNDED, **options)
    reference = step(unbounded, inputs, loss_of)
    if against_eager:
        close(step(make_seeded(make), inputs, loss_of), reference, tolerance)
    report = autoremat.report(unbounded)
    assert not report.fallbacks
    smallest = refusal(make, inputs, **options).smallest_peak_nbytes
    found = Peaks(smallest, report.predicted_peak_nbytes, report.resident_nbytes)
    assert found.resident < found.smallest <= found.save_all
    for share in shares:
        model = optimized(make, found.at(share), **options)
        with warnings.catch_warnings(record=True) as told:
            # A loss in eager code has no place in the smallest budget of the model alone.
            warnings.simplefilter("always", autoremat.OverBudgetWarning)
            same(reference, step(model, inputs, loss_of))
        assert autoremat.report(model).predicted_peak_nbytes <= found.at(share) or told
    return found


def recomputes(model: nn.Module) -> int:
    """How many operations the plan runs again."""
    return sum(value.recomputes for value in autoremat.report(model).values)
