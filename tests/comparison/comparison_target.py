"""What `tests/comparison/test_compare.py` compares: functions that other processes find by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autoremat
from tests.tiny import Blocks, Residual, many_rows


def make() -> tuple[nn.Module, Tensor]:
    """Four blocks on 256 rows."""
    torch.manual_seed(0)
    return Blocks(4), many_rows()


def peak_nbytes() -> int:
    """The peak of one step in eager mode, resident bytes included."""
    model, x = make()
    model(x).backward()
    model.zero_grad(set_to_none=True)

    def step() -> None:
        loss = model(x)
        loss.backward()

    return autoremat.resident_nbytes(model, x) + autoremat.measure_peak(step, device="cpu")


class Single(nn.Module):
    """One layer, and what a subclass does before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def before(self) -> None:
        """Nothing goes wrong."""

    def forward(self, x: Tensor) -> Tensor:
        self.before()
        return self.layer(x).square().mean()


class TooLarge(Single):
    """Asks for more than any machine has."""

    def before(self) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)


class RefusedByADevice(Single):
    """As torch says it of an accelerator."""

    def before(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


class Failing(Single):
    """An error of the model's own."""

    def before(self) -> None:
        raise KeyError("no such weight")


class Uncompiled(Single):
    """A forward that Dynamo leaves alone."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def make_small() -> tuple[nn.Module, Tensor]:
    return Residual(layers=2), many_rows()


def make_without_layers() -> tuple[nn.Module, Tensor]:
    return Single(), many_rows()


def make_too_large() -> tuple[nn.Module, Tensor]:
    return TooLarge(), many_rows()


def make_refused_by_a_device() -> tuple[nn.Module, Tensor]:
    return RefusedByADevice(), many_rows()


def make_failing() -> tuple[nn.Module, Tensor]:
    return Failing(), many_rows()


def make_uncompiled() -> tuple[nn.Module, Tensor]:
    return Uncompiled(), many_rows()


def make_nothing() -> None:
    return None
