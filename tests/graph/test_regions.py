"""Regions that layers share (`nested_compile_region`) are planned like other code."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.tiny import WIDTH, Layers, rows
from tests.training import gradients_hold, optimized, recomputes, step


@torch.compiler.nested_compile_region
def block(layer: nn.Module, x: Tensor) -> Tensor:
    """One layer with dropout."""
    return x + F.dropout(torch.tanh(F.gelu(layer(x))), 0.2)


@torch.compiler.nested_compile_region
def inner(x: Tensor) -> Tensor:
    """A region within a region, with a constant of its own."""
    return torch.tanh(x) * torch.linspace(0.5, 1.0, WIDTH)


@torch.compiler.nested_compile_region
def outer(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two results, one of which is used outside as well."""
    h = inner(layer(x))
    return x + inner(h), h


class Shared(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = block(layer, x)
        return x.square().mean()


class Nested(Layers):
    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for layer in self.layers:
            x, h = outer(layer, x)
            total = total + h.square().mean()
        return total + x.square().mean()


class InCheckpoint(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(block, layer, x, use_reentrant=False)
        return x.square().mean()


@pytest.mark.thorough
@pytest.mark.parametrize("make", [Shared, Nested, InCheckpoint], ids=lambda m: m.__name__)
def test_values_of_shared_regions_are_chosen_apart(make: type[nn.Module]):
    """Nothing falls back, gradients hold, and the smallest plan recomputes inside the regions."""
    smallest = gradients_hold(make, (rows(),), time_limit=60.0).smallest
    model = optimized(make, smallest, time_limit=60.0)
    step(model, (rows(),))
    assert recomputes(model) > 0
