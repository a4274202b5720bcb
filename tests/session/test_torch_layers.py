"""torch's own layers of layers have plans where the code that calls them is not compiled."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.session.torch_layers import traced_torch_layers
from tests.tiny import WIDTH, many_rows
from tests.training import make_seeded
from tests.watch.test_reach import OPTIONS, told, whole_peak

# Dynamo asks for the gradient of a layer's input, which is no leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

BATCH = many_rows(512)
LAYERS = 6


def perceptron() -> nn.Module:
    """As most code writes it."""
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Named(nn.Sequential):
    """A class of the user's, whose `forward` is torch's."""


def named() -> nn.Module:
    """The same by another class."""
    return Named(*perceptron())


class Encoder(nn.TransformerEncoderLayer):
    """Of rows, as one sequence."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True)


class Skipping(nn.Module):
    """Stops in a loop over its layers, each of which may be left out: Dynamo gives the loop up."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(LAYERS))
        self.skipped: frozenset[int] = frozenset()

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if float(torch.tensor(float(number in self.skipped))) < 0.5:
                x = x + layer(x)
        return x.square().mean()


class Experts(nn.Module):
    """Each takes the rows that are its own: none at all, it may be."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(perceptron() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        mine = (x.detach().sum(1) * 10).long() % (LAYERS + 1)  # the last is nobody's
        for number, expert in enumerate(self.experts):
            rows = torch.where(mine == number)[0]
            if rows.numel():
                x = x.index_add(0, rows, expert(x[rows]))
        return x.square().mean()


def take(model: nn.Module) -> None:
    """One step."""
    model.zero_grad(set_to_none=True)
    model(BATCH).backward()


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(Skipping, perceptron),
        functools.partial(Skipping, named),
        functools.partial(Skipping, Encoder),
        Experts,
    ],
)
def test_layers_in_a_loop_that_is_not_compiled_are_planned(make: Callable[[], nn.Module]):
    """Nothing of them was: the step took what it takes in eager mode."""
    plain = make_seeded(make)
    take(plain)
    budget = int(0.8 * whole_peak(plain, take, batch=BATCH))
    model = autoremat.optimize(make_seeded(make), budget, **OPTIONS)
    for _ in range(3):
        told(lambda: take(model))
    peaks: list[int] = []
    assert not told(lambda: peaks.append(whole_peak(model, take, batch=BATCH)))
    assert max(peaks) <= budget
    assert not autoremat.report(model).fallbacks
    take(plain)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-7)


def test_steps_in_which_layers_are_left_out_keep_the_budget():
    """Whichever they are."""
    model = make_seeded(functools.partial(Skipping, perceptron))
    take(model)
    budget = int(0.7 * whole_peak(model, take, batch=BATCH))
    autoremat.optimize(model, budget, **OPTIONS)
    take(model)
    for skipped in ({1}, {0, 4}, set(), {5}):
        model.skipped = frozenset(skipped)
        assert whole_peak(model, take, batch=BATCH) <= budget


def test_lines_are_still_the_user_s():
    """Not those of what stands in for torch's function."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = perceptron()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).square().mean()

    model = autoremat.optimize(Net(), "1GB", **OPTIONS)
    model(BATCH).backward()
    lines = {value.source for value in autoremat.report(model).graphs[0].values if value.source}
    assert lines
    assert all(line.startswith("test_torch_layers.py:") for line in lines)


def test_torch_s_classes_are_as_they_were():
    """Also within other such contexts; and there, they are what they were but for their file."""
    own = nn.Sequential.forward
    with traced_torch_layers():
        first = nn.Sequential.forward
        assert first is not own
        assert inspect.signature(first) == inspect.signature(own)
        assert inspect.getsource(first) == inspect.getsource(own)
        assert len(torch.fx.symbolic_trace(perceptron()).graph.nodes) == 5
        with traced_torch_layers():
            assert nn.Sequential.forward is first
        assert nn.Sequential.forward is first
    assert nn.Sequential.forward is own
    with traced_torch_layers():
        assert nn.Sequential.forward is first  # or all would be compiled again
    with contextlib.suppress(RuntimeError), traced_torch_layers():
        raise RuntimeError
    assert nn.Sequential.forward is own


def test_what_others_have_put_in_place_meanwhile_stays(monkeypatch: pytest.MonkeyPatch):
    """Theirs was the last word; one that they have seen in a call is torch's again behind it."""
    own = nn.Sequential.forward
    monkeypatch.setattr(nn.Sequential, "forward", own)  # put back in the end
    with traced_torch_layers():
        seen = nn.Sequential.forward
        nn.Sequential.forward = theirs = lambda module, x: x
    assert nn.Sequential.forward is theirs
    nn.Sequential.forward = seen
    with traced_torch_layers():
        assert nn.Sequential.forward is seen
    assert nn.Sequential.forward is own


@pytest.mark.parametrize("how", ["closure", "no function"])
def test_what_others_have_put_in_place_before_is_what_runs(
    how: str, monkeypatch: pytest.MonkeyPatch
):
    """With what it closes over, or whatever it is."""
    own, calls = nn.Sequential.forward, list[int]()

    class Counted:
        def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
            return counted(module, x)

    def counted(module: nn.Module, x: Tensor) -> Tensor:
        calls.append(1)
        return own(module, x)

    theirs = counted if how == "closure" else Counted()
    monkeypatch.setattr(nn.Sequential, "forward", theirs)
    with traced_torch_layers():
        assert nn.Sequential.forward(perceptron(), BATCH).shape == BATCH.shape
    assert calls
    assert nn.Sequential.forward is theirs


def test_calls_of_other_models_meanwhile_leave_a_model_s_plan_alone():
    """Its class has another `forward` for their time, which is none that the user has given it."""
    model = autoremat.optimize(perceptron(), "1GB", **OPTIONS)
    model(BATCH).square().mean().backward()
    before = model._autoremat_call.session
    with traced_torch_layers():  # as a call in another thread does
        model(BATCH).square().mean().backward()
    assert model._autoremat_call.session is before


def test_only_layers_of_layers_are_stood_in_for():
    """A single layer is not worth a graph; recurrent ones run in eager mode, as they say."""
    kinds = (nn.Module, nn.Linear, nn.LSTM, nn.ModuleList)
    own = [kind.forward for kind in kinds]
    with traced_torch_layers():
        assert [kind.forward for kind in kinds] == own
