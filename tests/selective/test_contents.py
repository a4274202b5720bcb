"""What a step without contents answers where a model asks for contents in an `if`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from autoremat import _torch
from autoremat.selective.contents import KnownContents, contents_followed
from tests.selective.stacks import Stack, batch, keeps, made, planned, range_of


@pytest.fixture
def known() -> Iterator[KnownContents]:
    """A step on fake tensors begins."""
    with _torch.FakeTensorMode(), contents_followed() as found:
        yield found


def test_what_follows_from_sizes_is_answered(known: KnownContents) -> None:
    """Positions, default masks, and what is computed from them."""
    positions = torch.arange(8).unsqueeze(0)
    jumps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    assert not jumps.any()
    assert positions.sum() == 28
    mask = torch.ones_like(torch.empty(3, 8), dtype=torch.bool)
    assert mask.all()
    assert torch.equal(mask, torch.full((3, 8), True))
    assert positions.max().item() == 7


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(4),
        lambda: torch.rand(4),
        lambda: torch.bernoulli(torch.ones(4)),
        lambda: torch.arange(4) * torch.empty(4),
        lambda: torch.zeros(2048, 1024),
        lambda: torch.empty_like(torch.arange(4)),
    ],
)
def test_what_depends_on_more_than_sizes_is_not(known: KnownContents, make: Any) -> None:
    """Nor is what would be large; asking for it fails as it does on any fake tensor."""
    value = make()
    assert value not in known
    with pytest.raises(_torch.DataDependentOutput):
        bool(value.any())


def test_contents_lie_as_what_they_are_of(known: KnownContents) -> None:
    """A view that fits the one fits the other; what nobody can compute here is not known."""
    ahead = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
    flat = torch.ones_like(ahead).permute(0, 2, 3, 1).flatten(0, 2)
    assert flat.all()
    assert torch.zeros_like(ahead.transpose(1, 2)).transpose(1, 2).sum() == 0
    added = torch.ones(4, dtype=torch.uint16) + torch.ones(4, dtype=torch.uint16)
    assert added not in known


def test_an_operator_of_somebody_else_s_is_not_run(known: KnownContents) -> None:
    """Nor are its contents known by its name."""
    library = torch.library.Library("elsewhere", "FRAGMENT")
    library.define("zeros(Tensor x) -> Tensor")
    torch.library.register_fake("elsewhere::zeros", torch.empty_like, lib=library)
    assert torch.ops.elsewhere.zeros(torch.arange(4)) not in known


def test_what_is_written_into_is_known_no_longer(known: KnownContents) -> None:
    """Nor is any view of it."""
    positions = torch.arange(8)
    half, other = positions[:4], torch.arange(8)
    half.add_(1)
    assert positions not in known
    assert half not in known
    assert other in known


class Asking(Stack):
    """Makes a mask only where positions jump, as transformers does."""

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[0])
        if (torch.diff(positions) != 1).any():
            x = x * torch.rand_like(x)
        return super().forward(x)


def test_a_model_that_asks_for_positions_is_planned() -> None:
    """Its step is followed to the branch that a real one takes."""
    model = made(Asking)
    least, most = range_of(model)
    keeps(planned(model, (least + most) // 2), model, batch())


def test_transformers_is_asked_as_before_once_a_step_is_over() -> None:
    """Also where the step fails."""
    library = pytest.importorskip("transformers.utils.import_utils")
    before = library.is_fake_tensor

    def failing_step() -> None:
        with _torch.FakeTensorMode(), contents_followed():
            assert not library.is_fake_tensor(torch.arange(4))
            assert library.is_fake_tensor(torch.empty(4))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_step()
    assert library.is_fake_tensor is before
