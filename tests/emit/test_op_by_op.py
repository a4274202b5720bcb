"""What runs op by op, where torch's tracing is wrong about an operation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat
from tests.tiny import WIDTH, sequences
from tests.training import make_seeded


class Transposed(nn.Module):
    """An activation whose gradient comes transposed, behind a layer whose backward views it."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.into(x)).transpose(1, 2).contiguous().cumsum(-1)
        return self.out(x.transpose(1, 2)).square().mean()


@pytest.mark.parametrize("through", ["optimize", "backend"])
@pytest.mark.parametrize("activation", [F.softplus, F.relu6, F.hardswish, F.hardsigmoid])
def test_strides_that_tracing_has_wrong_end_no_step(
    activation: Callable[[Tensor], Tensor], through: str
):
    """Gradients are eager mode's; torch's `aot_eager` raises an error."""
    plain, planned = (make_seeded(lambda: Transposed(activation)) for _ in range(2))
    options = {"compiler": "eager", "verbose": False}
    if through == "optimize":
        autoremat.optimize(planned, "1GB", **options)
    else:
        planned.compile(backend="autoremat", options={"budget": "1GB", **options})
    for model in (plain, planned):
        model(sequences()).backward()
    for mine, theirs in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)
