"""`repeatable=`: collectives and custom operators that run again where the user says they may."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint

import autoremat
from autoremat.errors import PlanMismatch, SteeringError
from tests.tiny import WIDTH, many_rows
from tests.training import UNBOUNDED, make_seeded, optimized, same, step

pytestmark = pytest.mark.shares_plans

SINE = "autoremat_tests.counted_sine"
REDUCTION = "_c10d_functional.all_reduce"
DEPTH = 3
runs: list[int] = []


@torch.library.custom_op("autoremat_tests::counted_sine", mutates_args=())
def counted_sine(x: Tensor) -> Tensor:
    """An operator that counts its runs."""
    runs.append(1)
    return x.sin()


counted_sine.register_fake(lambda x: torch.empty_like(x))
counted_sine.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class Sine(nn.Module):
    """A module that calls it."""

    def forward(self, x: Tensor) -> Tensor:
        return counted_sine(x)


class Layers(nn.Module):
    """Layers whose backward reads what a custom operator has made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.sine = Sine()

    def one(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(self.sine(torch.tanh(layer(x))).square())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.one(layer, x)
        return x.square().mean()


class Checkpointed(Layers):
    """The same, with each layer checkpointed by its user."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self.one, layer, x, use_reentrant=False)
        return x.square().mean()


def trained(budget: int | str = "min", make: type[Layers] = Layers, **options: Any) -> nn.Module:
    model = optimized(make, budget, **options)
    step(model, (many_rows(),))
    return model


def runs_in_a_step(model: nn.Module) -> int:
    runs.clear()
    step(model, (many_rows(),))
    return len(runs)


def predicted_nbytes(model: nn.Module) -> int:
    return int(autoremat.report(model).predicted_peak_nbytes)


@pytest.mark.parametrize("given", [SINE, torch.ops.autoremat_tests.counted_sine, "sine"], ids=str)
def test_a_custom_operator_may_run_again(given: Any):
    """Named by itself, or by the module that calls it; the gradients are those of eager mode."""
    kept, repeated = trained(), trained(repeatable=given)
    assert runs_in_a_step(kept) == DEPTH
    assert runs_in_a_step(repeated) > DEPTH
    assert predicted_nbytes(repeated) < predicted_nbytes(kept)
    expected = step(make_seeded(Layers), (many_rows(),))
    same(step(repeated, (many_rows(),)), expected)


def test_it_runs_again_only_where_that_pays():
    """It is a permission: with all the memory of the world, nothing is recomputed."""
    assert runs_in_a_step(trained(UNBOUNDED, repeatable=SINE)) == DEPTH


def test_what_is_checkpointed_runs_once_all_the_same():
    """In eager mode it runs again; of its draws and effects nothing is known."""
    assert runs_in_a_step(trained(UNBOUNDED, Checkpointed)) == DEPTH


def test_the_report_says_what_it_holds_for():
    """As for `save=` and `recompute=`."""
    (sentence,) = autoremat.report(trained(repeatable=SINE)).constraints
    assert sentence == f'repeatable="{SINE}" holds for {DEPTH} operations'


def test_a_stored_plan_needs_the_permission_again(tmp_path: Path):
    """A plan says what runs again; whether it may is the user's word."""
    path = tmp_path / "plan.json"
    model = trained(repeatable=SINE)
    count = runs_in_a_step(model)
    autoremat.save_plan(model, path)
    assert runs_in_a_step(trained(None, plan=path, repeatable=SINE)) == count
    with pytest.raises(PlanMismatch, match="repeatable= and offload= the same"):
        trained(None, plan=path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("aten.tanh", "neither a collective nor a custom operator"),
        ([SINE, torch.ops.aten.mm.default], "neither a collective nor a custom operator"),
        ("wheels.*", "matches no module"),
        (3, "repeatable= takes patterns of module paths"),
    ],
)
def test_what_nothing_can_be_said_of(given: Any, message: str):
    """Everything else runs again anyway, or changes the gradients if it does."""
    with pytest.raises(SteeringError, match=message):
        optimized(Layers, UNBOUNDED, repeatable=given)


def test_a_permission_need_not_be_used():
    """An operator may be in a later graph, or in none: nothing is lost."""
    sentences = autoremat.report(trained(repeatable=REDUCTION)).constraints
    assert f'repeatable="{REDUCTION}" holds for 0 operations' in sentences


# --- collectives -------------------------------------------------------------------------------


@pytest.fixture
def two_processes() -> Iterator[None]:
    """A group of two, of which only this process is there: collectives communicate nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    distributed.destroy_process_group()


class Block(nn.Module):
    """Up and down again, without a sum around it: what is reduced is what the next one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Blocks(nn.Sequential):
    """Several, and a loss."""

    def __init__(self) -> None:
        super().__init__(*[Block() for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def parallel(budget: int | str, **options: Any) -> nn.Module:
    """Trained in tensor parallel."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch._dynamo.reset()
    model = make_seeded(Blocks)
    mesh = distributed.init_device_mesh("cpu", (2,))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    given = {"compiler": "eager", "strict": True, "verbose": False, "time_limit": 4.0}
    autoremat.optimize(model, budget, **given, **options)
    model(many_rows()).backward()
    return model


def measured_nbytes(model: nn.Module) -> int:
    model.zero_grad(set_to_none=True)
    x = many_rows()
    before = autoremat.resident_nbytes(model, x)
    return before + autoremat.measure_peak(lambda: model(x).backward(), device="cpu")


@pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.usefixtures("two_processes")
@pytest.mark.thorough
def test_a_reduction_may_run_again():
    """The step then takes less than its reductions, kept, would; who is refused is told of it."""
    once, again = parallel("min"), parallel("min", repeatable=REDUCTION)
    assert measured_nbytes(again) <= predicted_nbytes(again) < predicted_nbytes(once)
    budget = (predicted_nbytes(again) + predicted_nbytes(once)) // 2
    with pytest.raises(autoremat.InfeasibleBudget) as caught:
        parallel(budget)
    assert any(f'repeatable="{REDUCTION}"' in note for note in caught.value.__notes__)
    (sentence,) = autoremat.report(once).communication
    assert f'repeatable="{REDUCTION}"' in sentence
    kept = re.search(r"is kept, ([0-9.]+) kB at the peak", sentence)
    assert kept is not None
    assert 1000 * float(kept[1]) >= predicted_nbytes(once) - predicted_nbytes(again)
    assert autoremat.report(again).communication == ()
    assert measured_nbytes(parallel(budget, repeatable=REDUCTION)) <= budget
