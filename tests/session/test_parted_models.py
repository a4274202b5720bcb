"""A model that code in eager mode parts into blocks, head and loss: all of its budget is used.

So FSDP2's hooks part the models of transformers: each block, the head, and the loss behind it.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.memory.meter import measure_peak, resident_nbytes
from tests.session.test_blocks import Body, compiles
from tests.tiny import WIDTH
from tests.training import close, make_seeded, optimized, step

# Dynamo looks at `.grad` of what it resumes with after a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

BLOCKS, VOCABULARY = 6, 512
TOKENS = torch.randint(VOCABULARY, (4, 128), generator=torch.Generator().manual_seed(0))
SHARES = (0.75, 0.6)  # of what a step takes without a plan, above what is resident


class Loss(nn.Module):
    """It is compiled by itself."""

    def forward(self, logits: Tensor, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Model(nn.Module):
    """Its loss is parted from its logits, which nobody holds once the loss is there.

    Blocks have norms, as the model has one behind them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Body() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head, self.loss = nn.Linear(WIDTH, VOCABULARY), Loss()
        for part in (*self.blocks, self.norm, self.head):
            part.register_forward_hook(_in_eager_mode)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.loss(self.head(self.norm(x)), tokens)


@torch.compiler.disable
def _in_eager_mode(*_: Any) -> None:
    """A graph break."""


def peak_of(model: nn.Module) -> int:
    """Measured bytes of one step, from no gradients."""
    model.zero_grad(set_to_none=True)
    resident = resident_nbytes(model, TOKENS)
    return resident + measure_peak(lambda: model(TOKENS).backward(), device="cpu")


@pytest.fixture(name="budget", params=SHARES)
def _budget(request: pytest.FixtureRequest) -> int:
    model = make_seeded(Model)
    step(model, (TOKENS,))
    resident = resident_nbytes(model, TOKENS)
    return resident + int(request.param * (peak_of(model) - resident))


def trained(budget: int, steps: int = 4) -> nn.Module:
    """A model that has settled; the first step may be above."""
    model = optimized(Model, budget)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoremat.OverBudgetWarning)
        for _ in range(steps):
            step(model, (TOKENS,))
    return model


def test_logits_that_are_gone_leave_their_room(budget: int):
    """They count beside the loss, and in no backward: what is predicted is what is measured."""
    reference = step(make_seeded(Model), (TOKENS,))
    model = trained(budget)
    close(reference, step(model, (TOKENS,)), 1e-5)
    measured = peak_of(model)
    assert 0.95 * budget <= measured <= budget
    assert autoremat.report(model).predicted_peak_nbytes == pytest.approx(measured, rel=0.02)


def test_a_norm_within_blocks_does_not_run_by_itself(budget: int):
    """No room is left for one, and nothing is planned anew when steps have shown that."""
    model = trained(budget)
    before, *_ = compiles(model)
    for _ in range(12):
        step(model, (TOKENS,))
    assert compiles(model)[0] == before


class Between(nn.Module):
    """Code in eager mode saves something for its backward, and leaves something, in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(WIDTH, WIDTH), Wide()

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self._between(self.before(x)))

    @torch.compiler.disable
    def _between(self, x: Tensor) -> Tensor:
        self.left = torch.zeros(4, *x.shape)
        return x.exp().sin().exp().sin()


class Wide(nn.Module):
    """Its forward has the peak."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.repeat(1, 16).cumsum(0).sum(1) * x[:, 0].detach()).square().mean()


def test_what_eager_code_saves_hides_nothing_that_it_leaves():
    """Neither counts twice, and neither covers for the other."""
    x = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(0))
    model = optimized(Between, "1GB", strict=False)
    for _ in range(3):
        step(model, (x,))
    model.zero_grad(set_to_none=True)
    resident = resident_nbytes(model, x)  # what is left of the step before is among it
    highest = resident + measure_peak(lambda: model(x).backward(), device="cpu")
    assert autoremat.report(model).predicted_peak_nbytes == pytest.approx(highest, rel=0.02)
