"""Backwards that the user has written, which run the model again and take gradients of that."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

import autoremat
from autoremat.memory.meter import measure_peak, resident_nbytes
from tests.tiny import Chain, many_rows
from tests.training import make_seeded

BATCH = many_rows(512)
STAGES = 6


class Field(Chain):
    """Layers without a loss."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        return x


class Adjoint(torch.autograd.Function):
    """Runs a field several times and saves only the last state: the adjoint method of an ODE."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, field: nn.Module, *_parameters: Tensor) -> Tensor:
        for _ in range(STAGES):
            x = x + field(x) / STAGES
        ctx.field = field
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,), field = ctx.saved_tensors, ctx.field
        parameters = list(field.parameters())
        total = [torch.zeros_like(parameter) for parameter in parameters]
        for _ in range(STAGES):
            x = x - field(x) / STAGES
            with torch.enable_grad():
                state = x.detach().requires_grad_()
                moved = field(state) / STAGES
                found = torch.autograd.grad(moved, [state, *parameters], gradient)
            gradient = gradient + found[0]
            total = [before + more for before, more in zip(total, found[1:], strict=True)]
        return gradient, None, *total


def take_step(field: nn.Module) -> None:
    """One step; what the backward holds from one stage to the next only its variables name."""
    field.zero_grad(set_to_none=True)
    Adjoint.apply(BATCH, field, *field.parameters()).square().mean().backward()


def whole_peak(field: nn.Module) -> int:
    """Of a step, with what is resident before it."""
    field.zero_grad(set_to_none=True)
    return resident_nbytes(field, BATCH) + measure_peak(lambda: take_step(field), device="cpu")


def test_what_a_written_backward_holds_from_stage_to_stage_is_found():
    """It is in variables of the function that takes gradients within the backward."""
    plain = make_seeded(lambda: Field(2))
    budget = int(0.8 * whole_peak(plain))
    field = make_seeded(lambda: Field(2))
    autoremat.optimize(field, budget, compiler="eager", verbose=False, time_limit=4.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", autoremat.OverBudgetWarning)
        for _ in range(3):
            take_step(field)
    found = [entry.message for entry in caught]
    lasting = [over.predicted_nbytes for over in found if not over.is_planned_anew]
    peak_nbytes = whole_peak(field)
    assert peak_nbytes <= 1.01 * max([budget, *lasting])
    take_step(plain)
    for ours, theirs in zip(field.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
