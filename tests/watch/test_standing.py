"""What stays where it is while forwards run: looked at once, and anew when it may have changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat import _torch
from autoremat.memory.optimizers import watch_optimizers
from autoremat.watch import standing
from autoremat.watch.standing import Standing, Together, of_root
from tests.tiny import WIDTH, rows
from tests.training import make_seeded

CPU = torch.device("cpu")
OPTIONS = {"budget": "1GB", "compiler": "eager", "verbose": False}


class Block(nn.Module):
    """One graph, whichever block runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Blocks(nn.Module):
    """So many of them, and operations in eager mode between them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.nn.functional.gelu(block(x))
        return x.square().mean()


def compiled(model: Blocks, optimizer: torch.optim.Optimizer, *, apart: bool) -> None:
    """Plan each block: as a list, or as a backend of each."""
    if apart:
        options = dict(OPTIONS)  # of this model alone: it would share its budget with others
        for block in model.blocks:
            block.compile(backend="autoremat", options=options)
    else:
        autoremat.optimize(list(model.blocks), optimizer=optimizer, **OPTIONS)


def visits(
    count: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    apart: bool,
    spread: Callable[[Blocks], Blocks] = lambda model: model,
) -> list[int]:
    """How often each of the first steps asks a tensor for its storage."""
    torch._dynamo.reset()
    model = spread(make_seeded(lambda: Blocks(count)))
    optimizer = torch.optim.AdamW(model.parameters())
    compiled(model, optimizer, apart=apart)
    found, ask = [0], torch.Tensor.untyped_storage

    def asked(tensor: Tensor) -> torch.UntypedStorage:
        found[-1] += 1
        return ask(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "untyped_storage", asked)
        for _ in range(4):
            model(rows()).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(0)
    return found[1:-1]  # without the first step, in which graphs are planned


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("apart", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_twice_the_layers_are_twice_the_work(monkeypatch: pytest.MonkeyPatch, apart: bool):
    """Not four times: each run of a block would look at all of them."""
    require_linear(functools.partial(visits, monkeypatch=monkeypatch, apart=apart))


def require_linear(count_visits: Callable[[int], list[int]]) -> None:
    """Given a number of layers, what the first steps ask for."""
    few, many = map(count_visits, (8, 16))
    assert all(most <= 2.2 * least for least, most in zip(few[:2], many[:2], strict=True))
    assert few[-1] < few[0] / 4


def test_a_model_is_looked_at_again_as_soon_as_it_may_hold_something_else():
    """A backward, an optimizer's step, gradients that go; else what was found before counts."""
    model = make_seeded(Block)
    optimizer = torch.optim.Adam(model.parameters())
    watcher = Watcher()
    watch_optimizers(watcher)
    parameters_nbytes = sum(p.nbytes for p in model.parameters())

    def found_nbytes() -> int:
        found = of_root(model, CPU)
        assert of_root(model, CPU) is found
        return sum(found.sizes.values())

    assert found_nbytes() == parameters_nbytes
    _torch.watch_backwards(lambda *_: None)
    model(rows()).sum().backward()
    before = of_root(model, CPU)
    optimizer.step()
    assert of_root(model, CPU) is not before
    assert found_nbytes() == 2 * parameters_nbytes
    optimizer.zero_grad()
    assert found_nbytes() == parameters_nbytes


class Watcher:
    """Of optimizers, whose steps are counted once there is one."""

    def optimizer_stepped(self, _optimizer: torch.optim.Optimizer) -> None:
        """It has."""


def test_a_backward_that_begins_makes_what_was_found_old(monkeypatch: pytest.MonkeyPatch):
    """Gradients come with it."""
    model = make_seeded(Block)
    found = of_root(model, CPU)
    monkeypatch.setattr(standing, "beginnings", lambda: -1)
    assert not found.is_true
    assert of_root(model, CPU).is_true


def test_what_fsdp1_moves_is_never_known():
    """Nothing tells which of its units have changed."""
    unit = SimpleNamespace(gathering=None)
    assert not Standing(CPU, [unit]).is_true
    assert Standing(CPU).is_true


def test_what_several_hold_counts_once():
    """Also where one of them comes to hold more; others make another account."""
    one, other = Standing(CPU), Standing(CPU)
    shared, own, later = (torch.zeros(count) for count in (8, 2, 1))
    one.add([shared])
    other.add([shared, own])
    together = Together().of([one])
    assert together.of([one, other]).nbytes == 40
    one.add([later])
    assert together.of([other, one]).nbytes == 44
    assert together.of([one]).nbytes == 36
