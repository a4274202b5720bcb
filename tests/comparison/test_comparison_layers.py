"""Checkpoints around a model's repeated layers, as `autoremat compare` puts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoremat.comparison.layers import NotApplicable, checkpoint_layers, repeated_layers
from tests.tiny import WIDTH, Block, Blocks, Chain, Layers, many_rows, rows
from tests.training import close, make_seeded, measured, same, step


class Skipping(Blocks):
    """The third block reads the first one's result as well."""

    def __init__(self) -> None:
        super().__init__(3)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.full((1,), 0.5)
        first, _ = self.blocks[0](x, scale)
        second, _ = self.blocks[1](first, scale)
        return self.blocks[2](first + second, scale)[0].square().mean()


class Scaled(Blocks):
    """Each block gets a number of its own."""

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x, _ = block(x, torch.full((1,), 0.1 * i))
        return x.square().mean()


class Twice(Layers):
    """The first layer runs again at the end."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = layer(x)
        return x.square().mean()


class Pairs(nn.Module):
    """The layers return two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.GRU(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return x.square().mean()


def paths(model: nn.Module) -> list[list[str]]:
    return [[place.path for place in run] for run in repeated_layers(model)]


def test_layers_are_neighbours_of_one_class() -> None:
    """Outermost lists only; layers with parts are preferred to leaves such as the stem's."""
    assert paths(Blocks()) == [[f"blocks.{i}" for i in range(5)]]
    assert paths(Chain(layers=3)) == [["layers.0", "layers.1", "layers.2"]]


def test_each_stage_is_a_run() -> None:
    """As in a ResNet, whose stages are lists of their own."""
    model = nn.Module()
    model.stem = nn.Linear(WIDTH, WIDTH)
    model.one = nn.Sequential(Block(), Block())
    model.two = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))
    assert paths(model) == [["one.0", "one.1"], ["two.0", "two.1"]]


def test_a_model_may_have_none() -> None:
    """One layer, layers of different classes, layers without parameters."""
    assert paths(nn.Linear(4, 4)) == []
    assert paths(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())) == []
    assert paths(nn.Sequential(nn.Tanh(), nn.Tanh())) == []
    with pytest.raises(NotApplicable, match="no repeated layers found"):
        checkpoint_layers(nn.Linear(4, 4), lambda: None)


def checkpointed(make: Callable[[], nn.Module], x: Tensor, **options: Any) -> nn.Module:
    model = make_seeded(make)
    checkpoint_layers(model, lambda: model(x), **options)
    return model


STRATEGIES = [
    {"segment": 1},
    {"segment": 2},
    {"segment": 0},
    {"segment": 9},
    {"selective": True},
]


@pytest.mark.thorough
@pytest.mark.parametrize("options", STRATEGIES, ids=str)
def test_the_step_stays_the_same_and_holds_less(options: dict[str, Any]) -> None:
    """Bit for bit; every strategy's peak is below that of the model as it was."""
    x = many_rows()
    model = checkpointed(Blocks, x, **options)
    plain = step(make_seeded(Blocks), [x])
    found = step(model, [x])
    renamed = {name.replace(".wrapped.", "."): g for name, g in found.gradients.items()}
    same(plain, type(found)(found.loss, renamed, found.state))
    if options != {"segment": 9}:  # one checkpoint around all recomputes all at once
        assert measured(model, [x]) < measured(make_seeded(Blocks), [x])


@pytest.mark.thorough
def test_fewer_checkpoints_hold_fewer_inputs() -> None:
    """All of a run's layers in one checkpoint: forward keeps one input, and backward everything."""
    x = many_rows()
    each, all_at_once = (measured(checkpointed(Blocks, x, segment=n), [x]) for n in (1, 5))
    assert each < all_at_once


@pytest.mark.thorough
def test_selective_checkpoints_save_products() -> None:
    """They hold more than checkpoints that save nothing, and less than no checkpoints."""
    x = many_rows()
    nothing, products = (
        measured(checkpointed(Blocks, x, selective=selective), [x]) for selective in (False, True)
    )
    assert nothing < products < measured(make_seeded(Blocks), [x])


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Skipping, "between blocks.1 and blocks.2 the model does more"),
        (Scaled, "between blocks.0 and blocks.1 the model does more"),
        (Chain, "between layers.0 and layers.1 the model does more"),
        (Twice, "layers.0 is not called exactly once"),
        (Pairs, "blocks.0 returns more than one tensor"),
    ],
)
def test_layers_that_do_not_follow_each_other_share_no_checkpoint(
    make: Callable[[], nn.Module], why: str
) -> None:
    """The reason names them; one checkpoint for each works all the same."""
    x = rows()
    with pytest.raises(NotApplicable, match=why):
        checkpointed(make, x, segment=5)
    model = checkpointed(make, x)
    found, plain = step(model, [x]), step(make_seeded(make), [x])
    renamed = {name.replace(".wrapped.", "."): g for name, g in found.gradients.items()}
    close(plain, type(found)(found.loss, renamed, found.state), 1e-6)
