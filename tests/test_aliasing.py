"""Tensors that share memory: outputs, inputs, parameters and buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.tiny import (
    Dropout,
    Layers,
    rows,
)
from tests.training import (
    UNBOUNDED,
    gradients_hold,
    optimized,
)


class ReturnsAliases(Layers):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = torch.tanh(self.first(x))
        z = torch.tanh(self.second(torch.tanh(h)))
        return z, h, h.t(), x, x.view(-1), h[0], z.view(-1)


def test_outputs_that_alias_inputs_and_intermediates():
    """Views of the input, of one another and of values that the backward reads."""
    gradients_hold(ReturnsAliases, (rows(),))
    model = optimized(ReturnsAliases, UNBOUNDED)
    x = rows()
    z, h, transposed, same_x, flat_x, _, _ = model(x)
    assert same_x is x
    assert flat_x.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert transposed.untyped_storage()._cdata == h.untyped_storage()._cdata
    assert z.requires_grad


class Dictionary(Layers):
    def forward(self, x: Tensor) -> dict[str, object]:
        h = torch.tanh(self.first(x))
        z = torch.tanh(self.second(h))
        return {"loss": z.square().mean(), "h": h, "d": h.detach(), "n": 3, "none": None, "l": [z]}


def test_outputs_in_containers_keep_their_structure():
    """A dict with numbers, None, a list and detached tensors comes back as it is."""
    gradients_hold(Dictionary, (rows(),), loss_of=lambda output: output["loss"])
    output = optimized(Dictionary, UNBOUNDED)(rows())
    assert output["n"] == 3
    assert output["none"] is None
    assert not output["d"].requires_grad
    assert isinstance(output["l"], list)


def test_an_input_that_needs_a_gradient():
    """Its gradient is that of eager mode."""
    gradients_hold(Dropout, (rows().requires_grad_(),))
