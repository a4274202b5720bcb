"""What verify measures is the user's step, and nothing that verify keeps itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autoremat
from tests.training import UNBOUNDED, optimized


class ReturnsLogits(nn.Module):
    """A loss, and the logits that it is of: far larger than anything else of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.second(self.first(x)).repeat(1, 32)
        return {"loss": logits.square().mean(), "logits": logits}


def test_what_the_model_returns_beside_its_loss_is_not_held_through_the_backward() -> None:
    """A step that takes the loss alone frees the rest before its backward, and so does verify."""
    x = torch.randn(64, 8)
    model = optimized(ReturnsLogits, UNBOUNDED)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x)["loss"].backward()

    result = autoremat.verify(model, x, loss_fn=lambda output: output["loss"])
    model.zero_grad(set_to_none=True)
    resident_nbytes = autoremat.resident_nbytes(model, x)
    peak_nbytes = resident_nbytes + autoremat.measure_peak(step, device="cpu")
    assert result.measured_peak_nbytes == peak_nbytes
