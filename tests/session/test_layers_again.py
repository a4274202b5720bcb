"""Recurrent layers that run again in the backward compute what they have computed, or say so."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoremat.optimized import optimized_call
from autoremat.session import layers_again
from tests.tiny import WIDTH, sequences
from tests.training import UNBOUNDED, close, make_seeded, optimized, step

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:AR109"),
]


class Recurrent(nn.Module):
    """A layer on each side of a recurrent one."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.recurrent(self.before(x))[0]).square().mean()


class Overwriting(Recurrent):
    """Writes into what the layer is given, of which that has saved a copy."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        x += self.recurrent(x)[0]
        return self.behind(x).square().mean()


def plain_and_rerunning(make: Callable[[], nn.Module] = Recurrent) -> tuple[nn.Module, nn.Module]:
    """A model in eager mode, and one whose layers run again from its second step on."""
    model = optimized(make, UNBOUNDED, strict=False)
    step(model, (sequences(),))
    optimized_call(model).session.steps.reruns_layers = True
    return make_seeded(make), model


def backward_in_evaluation(model: nn.Module) -> list[Tensor]:
    """The layer's dropout is off by then."""
    torch.manual_seed(3)
    loss = model(sequences())
    model.eval()
    return list(torch.autograd.grad(loss, list(model.parameters())))


def other_parameters(model: nn.Module) -> list[Tensor]:
    """The layer has its own again by the backward."""
    torch.manual_seed(3)
    given = {name: (1.1 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    loss = torch.func.functional_call(model, given, (sequences(),))
    return list(torch.autograd.grad(loss, list(given.values())))


def hooks_forbidden(model: nn.Module) -> list[Tensor]:
    """A checkpoint would need some."""
    torch.manual_seed(3)
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        loss = model(sequences())
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("take", [backward_in_evaluation, other_parameters, hooks_forbidden])
def test_what_others_change_until_the_backward_changes_no_gradient(
    take: Callable[[nn.Module], list[Tensor]],
):
    plain, model = plain_and_rerunning()
    for ours, theirs in zip(take(model), take(plain), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_layer_whose_input_is_written_into_does_not_run_again():
    """In eager mode that is allowed, as is seen in steps before."""
    plain, model = plain_and_rerunning(Overwriting)
    close(step(plain, (sequences(),)), step(model, (sequences(),)), 1e-5)


def test_parameters_that_are_written_into_before_the_backward_are_refused():
    """As in eager mode: gradients would be of others."""
    _, model = plain_and_rerunning()
    loss = model(sequences())
    with torch.no_grad():
        model.recurrent.weight_hh_l0.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_masks_of_a_library_of_a_device_are_not_drawn_again():
    """Those of cuDNN come from a state that `torch.cuda.set_rng_state` leaves as it is."""
    with torch.device("meta"):
        drawing, plain = nn.LSTM(2, 2, 2, dropout=0.5), nn.LSTM(2, 2, 2)
    assert not layers_again.may_run_again(drawing)
    assert layers_again.may_run_again(plain)
    assert layers_again.may_run_again(drawing.eval())
    assert layers_again.may_run_again(nn.LSTM(2, 2, 2, dropout=0.5))


def test_a_watched_input_is_not_held():
    """Only its version is known until the backward."""
    layer, given = nn.LSTM(WIDTH, WIDTH, batch_first=True), sequences()
    results = layer(given)
    layers_again.note_given(layer, results, given)
    given.add_(1)
    storage = weakref.ref(given.untyped_storage())
    del given
    assert storage() is None
    results[0].sum().backward()
    assert not layers_again.may_run_again(layer)
