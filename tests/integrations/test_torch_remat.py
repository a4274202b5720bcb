"""Regions of torch_remat: what one says is saved stays, all else of a checkpoint is made again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat
from autoremat.memory.meter import resident_nbytes
from autoremat.reporting import ValueAction
from tests.training import close, make_seeded, measured, optimized, step

remat = pytest.importorskip("torch_remat")

pytestmark = pytest.mark.shares_plans

ROWS, WIDTH, LAYERS = 64, 32, 6
SHARE = 0.8  # of what a step holds without checkpoints beside what is resident


class Block(nn.Module):
    """Two products, the first of which is in a region that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        wide = remat.region(self.up, "up", recompute=False)(self.norm(x))
        remat.recompute_needs_tensor(wide)
        return x + torch.tanh(self.down(F.gelu(wide)))


class Marked(nn.Module):
    """Blocks in checkpoints of torch_remat."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = remat.checkpoint(region_name=f"blocks.{number}")(block)(x)
        return x.square().mean()


class Plain(Marked):
    """The same without checkpoints."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize(
    "compiler",
    ["eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.thorough])],
)
def test_what_is_marked_decides_within_the_budget(compiler: str) -> None:
    """Gradients are those of the model without any, which torch_remat gives in eager mode too."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    plain = make_seeded(Plain)
    expected = step(plain, (x,))
    close(step(make_seeded(Marked), (x,)), expected, 1e-6)
    held = resident_nbytes(plain, (x,))
    budget = held + int(SHARE * (measured(plain, (x,)) - held))
    model = optimized(Marked, budget, compiler=compiler)
    close(step(model, (x,)), expected, 1e-5)
    assert measured(model, (x,)) <= budget


def test_saved_regions_are_saved_and_all_else_is_made_again() -> None:
    """At a budget that has room for all: it is what the marks say, not what would be fastest."""
    x = torch.randn(ROWS, WIDTH)
    model = optimized(Marked, "1GB")
    step(model, (x,))
    values = autoremat.report(model).values
    products = {
        width: [v for v in values if v.op == "addmm" and v.shape == (ROWS, width)]
        for width in (2 * WIDTH, WIDTH)
    }
    assert [len(found) for found in products.values()] == [LAYERS, LAYERS]
    assert all(v.action is ValueAction.SAVE and not v.recomputes for v in products[2 * WIDTH])
    assert all(v.recomputes == 1 for v in products[WIDTH])
