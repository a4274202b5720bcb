"""What selective checkpoints are refused for, before any step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.memory.meter import resident_nbytes
from tests.selective.stacks import TOKENS, WIDTH, ByKeyword, Stack, batch, made, planned


def test_a_budget_that_no_choice_fits_is_refused() -> None:
    """The error names one that is accepted, before any step."""
    model = made()
    with pytest.raises(autoremat.InfeasibleBudget) as refused:
        planned(model, resident_nbytes(model, batch()) + 4096)
    smallest = refused.value.smallest_peak_nbytes
    assert planned(model, smallest).peak_nbytes <= smallest


class Counted(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x).sigmoid()


class Normed(nn.Module):
    """Keeps statistics of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Counted, "writes to a buffer"),
        (Normed, "twice in its statistics"),
        (nn.Tanh, "no repeated"),
    ],
)
def test_blocks_that_must_not_run_twice_are_refused(make: type[nn.Module], why: str) -> None:
    """A checkpoint would change what they leave behind."""
    with pytest.raises(ValueError, match=why):
        planned(made(make=make), "min")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"device": "H100"}, "is not here"),
        ({"blocks": ["nothing"]}, "names of modules"),
        ({"blocks": ["blocks.0", "blocks.0.wide"]}, "a part of another"),
        ({"budget": "1GB reserved"}, "allocator reserves"),
        ({"budget": "much"}, "no number with a unit"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: dict[str, Any], why: str) -> None:
    """Before anything is followed."""
    with pytest.raises(ValueError, match=why):
        autoremat.selective_checkpoints(made(), batch(), **{"budget": "min"} | options)


class WritesToItsInput(nn.Module):
    """Scales what it is given, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(2))


class Picking(Stack):
    """Leaves out what is negative."""

    def forward(self, x: Tensor) -> Tensor:
        x = x[x > 0].view(-1, 1).expand(-1, WIDTH)
        return super().forward(x)


@pytest.mark.parametrize("kind", [Stack, ByKeyword])
def test_a_block_that_writes_to_its_input_is_refused(kind: type[nn.Module]) -> None:
    """The rerun would be given what the first run has written."""
    with pytest.raises(ValueError, match="write"):
        planned(made(kind, make=WritesToItsInput), "min")


def test_sizes_that_data_decide_are_refused() -> None:
    """Tensors without contents have none."""
    with pytest.raises(ValueError, match="depends on what aten"):
        planned(made(Picking), "min")


def test_a_block_that_does_not_run_is_named() -> None:
    """Such as the list of the blocks."""
    with pytest.raises(ValueError, match=r"names blocks: the step does not call it"):
        planned(made(), "min", blocks=["blocks"])


def test_a_block_with_checkpoints_of_its_own_is_refused() -> None:
    """Its layers would run three times."""
    model = made()
    model.blocks[0].gradient_checkpointing = True
    with pytest.raises(ValueError, match="does so already"):
        planned(model, "min", blocks=["blocks.0"])


class WithoutLoss(Stack):
    """Returns what a loss is to be made of."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_what_is_not_known_of_a_loss_is_said() -> None:
    """A loss outside takes what it takes."""
    assert "Assumed: the loss is outside" in str(planned(made(WithoutLoss), "min"))
    assert not planned(made(), "min").assumed
