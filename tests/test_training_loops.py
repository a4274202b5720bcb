"""What training loops hold beside a model: gradients, optimizers, and copies of its weights."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import autoremat
from autoremat.memory.meter import measure_peak, resident_nbytes, state_of
from autoremat.memory.storage_sizes import storages_nbytes
from tests.tiny import Blocks, many_rows
from tests.training import optimized, peaks

CPU, BATCH = torch.device("cpu"), many_rows()
WIDE = 128


class Wide(nn.Module):
    """As much in parameters as in activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, WIDE)
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@dataclass
class Loop:
    """A step, what steps the model, and what else stands in the list that is optimised."""

    take: Callable[[], object]
    optimizers: Sequence[torch.optim.Optimizer] = ()
    others: list[nn.Module] = field(default_factory=list)


def micro_batches(model: nn.Module) -> Loop:
    """Three backwards add up, the first of them to nothing."""

    def take() -> None:
        model.zero_grad(set_to_none=True)
        for _ in range(3):
            (model(BATCH) / 3).backward()

    return Loop(take)


def kept_gradients(model: nn.Module) -> Loop:
    """Gradients are zeroed, and never go."""

    def take() -> None:
        model.zero_grad(set_to_none=False)
        for _ in range(3):
            (model(BATCH) / 3).backward()

    return Loop(take)


def foreach(model: nn.Module) -> Loop:
    """The optimizer's step takes temporaries of all parameters' size."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def take() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(BATCH).backward()
        optimizer.step()

    return Loop(take, [optimizer])


def in_backward(model: nn.Module) -> Loop:
    """Each parameter has an optimizer, which steps as soon as its gradient is there."""
    optimizers = {p: torch.optim.SGD([p], 1e-4, momentum=0.9) for p in model.parameters()}

    def apply(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(apply)
    return Loop(lambda: model(BATCH).backward(), list(optimizers.values()))


def averaged(model: nn.Module) -> Loop:
    """A moving average of the weights, which stands in the list."""
    average = copy.deepcopy(model).requires_grad_(False)

    def take() -> None:
        model.zero_grad(set_to_none=True)
        model(BATCH).backward()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.01)

    return Loop(take, others=[average])


def whole_peak(model: nn.Module, loop: Loop) -> int:
    """Measured bytes of a step, with what is there before it."""
    held = resident_nbytes(nn.ModuleList([model, *loop.others]), BATCH)
    held += storages_nbytes(state_of(loop.optimizers), CPU)
    return held + measure_peak(loop.take, device="cpu")


def made(make: Callable[[nn.Module], Loop]) -> tuple[nn.Module, Loop]:
    """A model and its loop, the same each time."""
    torch.manual_seed(0)
    model = Wide().train()
    return model, make(model)


@pytest.mark.parametrize(
    ("make", "is_passed"),
    [
        *((make, True) for make in (micro_batches, kept_gradients, averaged)),
        *((make, passed) for make in (foreach, in_backward) for passed in (True, False)),
    ],
)
def test_a_loop_keeps_its_budget(make: Callable[[nn.Module], Loop], is_passed: bool):
    """From the second step on; parameters and gradients are those of the loop in eager mode."""
    plain, eager = made(make)
    eager.take()
    budget = int(0.95 * whole_peak(plain, eager))
    model, loop = made(make)
    options: dict[str, Any] = {"compiler": "eager", "verbose": False, "time_limit": 4.0}
    autoremat.optimize(
        [model, *loop.others],
        budget,
        optimizer=loop.optimizers if is_passed else None,
        **options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoremat.OverBudgetWarning)
        loop.take()
    peak = whole_peak(model, loop)
    assert peak <= budget
    report = autoremat.report(model)
    assert peak <= report.predicted_peak_nbytes <= budget
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
        assert (mine.grad is None) == (theirs.grad is None)


def test_gradients_that_an_optimizer_takes_in_the_backward_come_all_at_once():
    """Of one graph: so they count as kept, and the peak is what is predicted."""
    model, loop = made(in_backward)
    autoremat.optimize(model, "min", compiler="eager", verbose=False, optimizer=loop.optimizers)
    for _ in range(2):
        loop.take()
    assert whole_peak(model, loop) == autoremat.report(model).predicted_peak_nbytes


@pytest.mark.thorough
def test_state_that_comes_with_a_first_step_counts_for_each_plan_of_the_steps():
    """Gradients that exist have a plan of their own, and it is the last to run before the state."""
    budget = peaks(Blocks, [many_rows()]).at(0.6)
    model = optimized(Blocks, budget)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    measured_nbytes = []
    for number in range(8):
        batch = many_rows()
        held = resident_nbytes(model, batch) + storages_nbytes(state_of([optimizer]), CPU)
        backward = functools.partial(lambda x: model(x).backward(), batch)
        if number > 1:  # those before it compile
            measured_nbytes.append(held + measure_peak(backward, device="cpu"))
        else:
            backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    assert max(measured_nbytes) <= budget
