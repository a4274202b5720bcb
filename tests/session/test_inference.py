"""Calls without gradients while nothing waits: no plan makes them smaller, so they are told of."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import autoremat
from autoremat.memory.live_storages import LiveStorages
from autoremat.memory.meter import measure_peak, resident_nbytes
from autoremat.session import meanwhile
from tests.session.residual_blocks import ResidualBlocks
from tests.training import make_seeded, told

WIDTH = 64
OPTIONS = {"compiler": "eager", "verbose": False, "time_limit": 4.0}


def batch_of(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))


def model_of() -> nn.Module:
    return make_seeded(lambda: ResidualBlocks(WIDTH, 4))


def trained(through: str, budget_nbytes: int) -> nn.Module:
    """Planned, and settled."""
    model = model_of()
    if through == "optimize":
        autoremat.optimize(model, budget_nbytes, **OPTIONS)
    else:
        model.compile(backend="autoremat", options={"budget": budget_nbytes, **OPTIONS})
    for _ in range(3):
        train(model)
    return model


def train(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)
    model(batch_of(256)).backward()


def whole_peak(model: nn.Module, call: Callable[[], object], batch: Tensor) -> int:
    return resident_nbytes(model, batch) + measure_peak(call)


@pytest.fixture(name="budget_nbytes", scope="module")
def fixture_budget_nbytes() -> int:
    """What a training step takes, less a fifth."""
    plain = model_of()
    return int(0.8 * whole_peak(plain, lambda: train(plain), batch_of(256)))


@pytest.fixture(name="looks")
def fixture_looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LiveStorages]]:
    """Those that were taken."""
    taken: list[LiveStorages] = []

    class Noted(LiveStorages):
        def __post_init__(self) -> None:
            super().__post_init__()
            taken.append(self)

    monkeypatch.setattr(meanwhile, "LiveStorages", Noted)
    return taken


@pytest.mark.parametrize("through", ["optimize", "backend"])
def test_one_above_the_budget_is_told_of_once(budget_nbytes: int, through: str):
    model, batch = trained(through, budget_nbytes), batch_of(4096)

    @torch.no_grad()
    def call() -> None:
        model(batch)

    (over,) = told(call)
    assert over.alone == "inference"
    assert not over.is_planned_anew
    assert "runs without gradients" in str(over)
    peak_nbytes = whole_peak(model, call, batch)
    assert budget_nbytes < over.predicted_nbytes <= peak_nbytes
    assert over.predicted_nbytes == pytest.approx(peak_nbytes, rel=0.05)
    assert not told(call)


@pytest.mark.parametrize("through", ["optimize", "backend"])
def test_no_plan_is_made_for_it(budget_nbytes: int, through: str):
    """Nor is a step told of that comes after it."""
    model = trained(through, budget_nbytes)
    plans = [graph.predicted_peak_nbytes for graph in autoremat.report(model).graphs]
    with torch.no_grad():
        assert told(lambda: model(batch_of(4096)))
    assert not told(lambda: [train(model) for _ in range(3)])
    assert [graph.predicted_peak_nbytes for graph in autoremat.report(model).graphs] == plans
    assert whole_peak(model, lambda: train(model), batch_of(256)) <= budget_nbytes


@pytest.mark.parametrize("through", ["optimize", "backend"])
def test_an_evaluation_is_no_part_of_a_training_step(budget_nbytes: int, through: str):
    model = trained(through, budget_nbytes).eval()
    with torch.no_grad():
        assert not told(lambda: model(batch_of(4096)))


def test_one_within_the_budget_is_not_told_of(budget_nbytes: int, looks: list[LiveStorages]):
    model = trained("optimize", budget_nbytes)
    with torch.no_grad():
        assert not told(lambda: model(batch_of(256)))
    assert len(looks) == 1


def test_ever_larger_ones_are_looked_into_ever_more_rarely(
    budget_nbytes: int, looks: list[LiveStorages]
):
    """As they come where text is generated, token by token."""
    model = trained("optimize", budget_nbytes)
    with torch.inference_mode():
        for rows in range(1, 257):
            model(batch_of(rows))
    assert 8 <= len(looks) <= 90


def test_before_anything_is_trained_nothing_is_looked_into(looks: list[LiveStorages]):
    model = autoremat.optimize(model_of(), 1, **OPTIONS)
    with torch.no_grad():
        assert not told(lambda: model(batch_of(4096)))
    assert not looks


def test_state_that_does_not_exist_yet_counts_as_nothing():
    """Of an optimizer that has made no step."""
    plain, model, batch = model_of(), model_of(), batch_of(4096)
    with torch.no_grad():
        budget_nbytes = whole_peak(plain, lambda: plain(batch), batch)
    optimizer = torch.optim.AdamW(model.parameters())
    autoremat.optimize(model, budget_nbytes, optimizer=optimizer, **OPTIONS)
    train(model)
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        assert not told(lambda: model(batch))
        assert told(lambda: model(batch_of(1 << 15)))


class Odd(nn.Module):
    """Blocks that are given what they do not need: most of a batch, something beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = ResidualBlocks(WIDTH, 2)

    def forward(self, x: Tensor, _other: object = None) -> Tensor:
        return self.blocks(x[:256])


def test_each_of_several_models_is_looked_into():
    """Also behind many calls of another that takes less, of as much."""
    small, large, batch = make_seeded(Odd), model_of(), batch_of(1 << 14)
    autoremat.optimize([small, large], "20MB", **OPTIONS)
    for model in (small, large):
        model(batch[:256]).backward()
    with torch.no_grad():
        assert not told(lambda: [small(batch) for _ in range(5)])
        assert told(lambda: large(batch))


def test_arguments_that_cannot_be_looked_into_do_no_harm(
    budget_nbytes: int, looks: list[LiveStorages]
):
    """A list that is in itself, a fake tensor."""
    model = autoremat.optimize(make_seeded(Odd), budget_nbytes, **OPTIONS)
    train(model)
    cyclic: list[object] = []
    cyclic.append(cyclic)
    with torch.no_grad():
        model(batch_of(256), cyclic)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert not told(lambda: model(torch.empty(1 << 17, WIDTH)))
    assert not looks


def test_checkpoints_that_run_without_gradients_are_part_of_the_step():
    """Reentrant ones."""
    model = model_of()
    autoremat.optimize(list(model.blocks), "6MB", **OPTIONS)

    def step(rows: int) -> None:
        x = model.first(batch_of(rows))
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        x.square().mean().backward()

    warned = told(lambda: [step(rows) for rows in (1024, 1024, 8192)])
    assert warned
    assert not any(over.alone for over in warned)
