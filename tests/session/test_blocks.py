"""Blocks that are compiled once and run many times: one budget for all of their runs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat import _torch
from autoremat.memory.meter import measure_peak, resident_nbytes
from tests.tiny import WIDTH, many_rows
from tests.training import close, make_seeded, measured, optimized, same, step

# Dynamo looks at `.grad` of what a block is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

BLOCKS = 8
BATCH = many_rows()


class Body(nn.Module):
    """A residual block of operations that cost much and others that cost little."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(nn.functional.gelu(self.wide(self.norm(x)))))


class Stack(nn.Module):
    """Equal blocks between code in eager mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Body() for _ in range(BLOCKS))
        self.skipped: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = x if number in self.skipped else block(x)
        return x.square().mean()


def options(budget: int, **more: Any) -> dict[str, Any]:
    """For the backend."""
    return {"budget": budget, "compiler": "eager", "verbose": False, "time_limit": 2.0} | more


def blockwise(budget: int, **more: Any) -> Stack:
    """A stack whose blocks are compiled alone, under one budget."""
    torch._dynamo.reset()
    model, given = make_seeded(Stack), options(budget, **more)
    for block in model.blocks:
        block.compile(backend="autoremat", options=given)
    return model


def budget_at(share: float) -> int:
    """A share of what a step takes without a plan, above what is resident."""
    model = make_seeded(Stack)
    step(model, (BATCH,))
    highest, resident = measured(model, (BATCH,)), resident_nbytes(model, BATCH)
    return resident + int(share * (highest - resident))


def compiles(model: nn.Module) -> list[int]:
    """How often graphs were compiled, in which step the latest, and how many steps there were."""
    facts = {fact.name: fact.text for fact in autoremat.report(model).facts}
    return list(map(int, re.findall(r"\d+", facts["Compiles"])))


def peak_of(model: nn.Module) -> int:
    """Measured bytes of one step, from no gradients."""
    model.zero_grad(set_to_none=True)
    resident = resident_nbytes(model, BATCH)
    return resident + measure_peak(lambda: model(BATCH).backward(), device="cpu")


@pytest.mark.parametrize("share", [0.7, 0.45])
def test_equal_blocks_keep_one_budget_and_settle(share: float):
    """From the first step on; at the second they get their plans, and nothing is compiled later."""
    reference, budget = step(make_seeded(Stack), (BATCH,)), budget_at(share)
    model = blockwise(budget)
    graphs = _torch.dynamo_counters["stats"]["unique_graphs"]
    for _ in range(3):
        close(reference, step(model, (BATCH,)), 1e-5)
    assert peak_of(model) <= budget
    report = autoremat.report(model.blocks[0])
    assert [graph.name for graph in report.graphs] == ["graph 0", "graph 0, last runs"]
    assert report.is_within_budget
    for _ in range(20):
        step(model, (BATCH,))
    assert compiles(model.blocks[3]) == [3, 2, 24]
    assert _torch.dynamo_counters["stats"]["unique_graphs"] == graphs + 1
