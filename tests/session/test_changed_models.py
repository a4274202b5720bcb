"""A model that is copied, or changed, after it was optimised: what becomes of its plan."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import pickle
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.optim.swa_utils import AveragedModel

import autoremat
import autoremat.optimized
from autoremat import _torch
from autoremat.memory.meter import resident_nbytes
from tests.tiny import WIDTH, Chain, many_rows
from tests.training import (
    UNBOUNDED,
    Peaks,
    close,
    make_seeded,
    measured,
    optimized,
    peaks,
    same,
    step,
)

# Dynamo looks at `.grad` of what another module has returned.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.shares_plans,
]

BATCH = many_rows()
NUMBERS = itertools.count()  # of files


# --- copied ------------------------------------------------------------------------------------


def test_a_deep_copy_is_planned_as_its_original_is():
    """At its own first training call, and under a budget of its own."""
    model = optimized(Chain, "min")
    ours = step(model, (BATCH,))
    copied = copy.deepcopy(model)
    assert not autoremat_compiled(copied)
    same(ours, step(copied, (BATCH,)))
    assert autoremat.report(copied).graphs
    assert autoremat.report(copied) is not autoremat.report(model)
    smallest = autoremat.report(model).predicted_peak_nbytes
    assert measured(copied, (BATCH,)) <= smallest


def test_a_copy_of_a_copy_and_of_a_model_that_holds_one():
    """Each is planned, whether or not what it is copied from has been trained."""

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.first = inner, nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.first(x))

    outer = copy.deepcopy(copy.deepcopy(Outer(optimized(Chain, UNBOUNDED)))).train()
    with pytest.raises(ValueError, match="Nothing is planned yet"):
        autoremat.report(outer.inner)
    step(outer, (BATCH,))
    assert autoremat.report(outer.inner).graphs


def test_a_copy_that_is_not_trained_is_the_plain_model():
    """A moving average, a frozen reference: nothing is compiled or told."""
    model = optimized(Chain, UNBOUNDED)
    average = copy.deepcopy(model).requires_grad_(False)
    evaluated = copy.deepcopy(model).eval()
    for copied in (average, evaluated):
        assert torch.equal(copied(BATCH), make_seeded(Chain)(BATCH))
        assert not autoremat_compiled(copied)


def test_a_moving_average_is_left_alone():
    """It is a copy that is never trained."""
    model = optimized(Chain, "min")
    average = AveragedModel(model)
    step(model, (BATCH,))
    average.update_parameters(model)
    with torch.no_grad():
        assert torch.equal(average(BATCH), make_seeded(Chain)(BATCH))
    assert not autoremat_compiled(average.module)


@pytest.mark.parametrize("make", [AveragedModel, copy.deepcopy])
def test_a_moving_average_is_held_by_every_step(make: Callable[[nn.Module], nn.Module]):
    """One that comes after the plan is told of once, then planned for; until it is trained."""
    found = peaks(Chain, (BATCH,))
    model = optimized(Chain, found.at(0.7))
    for _ in range(2):
        step(model, (BATCH,))
    average = make(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", autoremat.OverBudgetWarning)
        for _ in range(3):
            step(model, (BATCH,))
    assert len(told) == 1
    report = autoremat.report(model)
    copied = average.module if isinstance(average, AveragedModel) else average
    highest = resident_nbytes(copied) + measured(model, (BATCH,))
    assert highest <= report.predicted_peak_nbytes <= report.budget_nbytes
    assert copied in _torch.compiled_call(model).training.members.copies
    step(copied, (BATCH,))
    assert not _torch.compiled_call(model).training.members.copies


def test_a_copy_of_a_module_under_a_shared_budget_shares_it():
    """They are planned together from the call on that trains the copy."""
    torch._dynamo.reset()
    models = [make_seeded(Chain), make_seeded(Chain)]
    options = {"compiler": "eager", "strict": True, "verbose": False}
    autoremat.optimize(models, UNBOUNDED, **options)
    for model in models:
        model(BATCH).backward()
    copied = copy.deepcopy(models[0])
    for model in (*models, copied):
        model(BATCH).backward()
    calls = [autoremat.optimized.optimized_call(model) for model in (*models, copied)]
    assert len({id(call.training) for call in calls}) == 1


def test_a_copy_can_be_optimised_otherwise():
    """What the copy was to have is forgotten."""
    copied = copy.deepcopy(optimized(Chain, "min"))
    autoremat.optimize([copied], UNBOUNDED, compiler="eager", strict=True, verbose=False)
    step(copied, (BATCH,))
    assert autoremat.report(copied).budget_nbytes == UNBOUNDED


def test_a_copy_that_cannot_share_the_budget_is_plain_and_that_is_told():
    """It has gone to another device."""
    models = [make_seeded(Chain), make_seeded(Chain)]
    autoremat.optimize(models, UNBOUNDED, compiler="eager", verbose=False)
    copied = copy.deepcopy(models[0]).to("meta")
    with pytest.warns(autoremat.FallbackWarning, match="AR118.*several devices"):
        copied(BATCH.to("meta")).backward()
    assert not autoremat_compiled(copied)


class Copies(Chain):
    """A module that says itself what a copy of it gets: all that it holds."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))


@pytest.mark.parametrize("make", [Chain, Copies])
@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_a_pickled_model_is_plain_and_that_is_told_once(make: type[Chain], how: str):
    """As with `nn.Module.compile`; the original stays planned."""
    model = optimized(make, UNBOUNDED)
    ours = step(model, (BATCH,))

    def pickled() -> nn.Module:
        if how == "pickle":
            return pickle.loads(pickle.dumps(model))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    with pytest.warns(autoremat.FallbackWarning, match="AR118.*pickled"):
        copied = pickled()
    close(step(copied, (BATCH,)), ours, 1e-6)
    with pytest.raises(ValueError, match="not optimised"):
        autoremat.report(copied)
    pickled()
    assert autoremat.report(model).graphs


def test_a_shallow_copy_is_plain_and_is_copied_and_pickled_as_that():
    """It holds what its original does, and nothing comes of that."""
    model = optimized(Chain, UNBOUNDED)
    shallow = copy.copy(model)
    both = copy.deepcopy([shallow, model])
    with pytest.warns(autoremat.FallbackWarning, match="AR118"):
        pickle.loads(pickle.dumps(both[0]))
    for copied in both:
        step(copied, (BATCH,))
    assert [autoremat_compiled(copied) for copied in both] == [False, True]
    del model
    pickle.loads(pickle.dumps(shallow))


def test_a_question_plans_no_copy():
    """Nor does a transform of torch.func, in which nothing is compiled."""
    copied = copy.deepcopy(optimized(Chain, UNBOUNDED))
    parameters = dict(copied.named_parameters())

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(copied, values, (BATCH,))

    torch.func.grad(loss)(parameters)
    for ask in (autoremat.report, lambda model: autoremat.save_plan(model, "unused")):
        with pytest.raises(ValueError, match="Nothing is planned yet"):
            ask(copied)
    assert not autoremat_compiled(copied)


def test_a_module_that_says_what_it_holds_is_copied_with_its_plan():
    """Its compiled call is among that."""
    model = optimized(Copies, UNBOUNDED)
    ours, copied = step(model, (BATCH,)), copy.deepcopy(model)
    same(ours, step(copied, (BATCH,)))
    assert autoremat.report(copied).graphs


def autoremat_compiled(model: nn.Module) -> bool:
    """Whether a call of the model was planned."""
    call = model._compiled_call_impl
    return isinstance(call, autoremat.optimized.OptimizedCall)


# --- changed -----------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer beside a product of two small ones, as LoRA has it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = (nn.Linear(*sizes, bias=False) for sizes in ((WIDTH, 4), (4, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def adapt(model: nn.Module) -> None:
    """Replace the layers of a model that has been trained."""
    torch.manual_seed(1)
    model.layers = nn.ModuleList(map(Adapted, model.layers))


def freeze(model: nn.Module) -> None:
    """Leave the second half to be trained."""
    model.layers[:3].requires_grad_(False)


def grow(model: nn.Module) -> None:
    """Add a layer."""
    torch.manual_seed(1)
    model.layers.append(nn.Linear(WIDTH, WIDTH))


def load(model: nn.Module) -> None:
    """Give the model other tensors."""
    torch.manual_seed(1)
    model.load_state_dict(Chain().state_dict(), assign=True)


@cache
def peaks_of_the_chain() -> Peaks:
    """As it is before it is changed."""
    return peaks(Chain, [BATCH])


@pytest.mark.parametrize(
    "change",
    [
        *(adapt, freeze, grow, load, nn.Module.bfloat16, nn.Module.half),
        pytest.param(nn.Module.double, marks=pytest.mark.thorough),
    ],
)
def test_a_model_that_is_changed_is_planned_anew(change: Callable[[nn.Module], Any]):
    """The next step is that of the changed model, and keeps the budget."""

    def made() -> nn.Module:
        model = make_seeded(Chain)
        change(model)
        return model

    batch = BATCH.to(next(made().parameters()).dtype)
    budget = max(peaks_of_the_chain().at(0.5), peaks(made, [batch]).at(0.5))
    model = optimized(Chain, budget)
    step(model, [BATCH])
    change(model)
    ours = step(model, [batch])
    close(step(made(), [batch]), ours, 1e-6 if batch.dtype.itemsize > 2 else 1e-2)
    assert measured(model, [batch]) <= budget
    assert autoremat.report(model).predicted_peak_nbytes <= budget


def offloading_to(folder: Path) -> Any:
    """Hooks that keep each saved tensor in a file of its own."""

    def pack(tensor: Tensor) -> Path:
        path = folder / f"{next(NUMBERS)}.pt"
        torch.save(tensor, path)
        return path

    return torch.autograd.graph.saved_tensors_hooks(pack, torch.load)


class OnDisk(Chain):
    """Hooks inside of the forward: around all of it, or around each layer in a loop."""

    folder: Path
    by_layer = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.by_layer:
            with offloading_to(self.folder):
                return super().forward(x)
        for layer in self.layers:
            with offloading_to(self.folder):
                x = torch.tanh(layer(x))
        return x.square().mean()


def test_saved_tensors_go_to_disk_around_a_planned_step(tmp_path: Path):
    """What the plan saves, and nothing else."""
    model = optimized(Chain, peaks_of_the_chain().at(0.4))
    with offloading_to(tmp_path):
        ours = step(model, [BATCH])
    close(step(make_seeded(Chain), [BATCH]), ours, 1e-6)
    assert autoremat.report(model).graphs
    assert list(tmp_path.iterdir())


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_model_that_offloads_inside_its_forward(tmp_path: Path, by_layer: bool):
    """What stands inside of the hooks is planned; in a loop Dynamo gives up, which is told."""
    OnDisk.folder, OnDisk.by_layer = tmp_path, by_layer
    model = autoremat.optimize(make_seeded(OnDisk), UNBOUNDED, compiler="eager", verbose=False)
    told = pytest.warns(autoremat.FallbackWarning, match="AR105.*hooks on saved tensors inside")
    with told if by_layer else contextlib.nullcontext():
        ours = step(model, [BATCH])
    close(step(make_seeded(OnDisk), [BATCH]), ours, 1e-6)
    assert list(tmp_path.iterdir())
    assert bool(autoremat.report(model).graphs) != by_layer


def test_hooks_on_saved_tensors_stand_around_a_planned_step():
    """What the plan saves goes through them: to host memory and back, say."""
    budget = peaks_of_the_chain().at(0.4)
    expected = step(optimized(Chain, budget), [BATCH])
    model = optimized(Chain, budget)
    taken = []
    for around in (
        save_on_cpu(),
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: taken.append(t.nbytes) or t, lambda t: t
        ),
    ):
        with around:
            same(expected, step(model, [BATCH]))
    assert taken


class Transposed(Chain):
    """What its loss reads, and saves, lies column by column."""

    def forward(self, x: Tensor) -> Tensor:
        *layers, last = self.layers
        for layer in layers:
            x = torch.tanh(layer(x))
        return torch.tanh(last(x).transpose(1, 2)).square().mean()


def test_hooks_may_lay_out_anew_what_is_saved():
    """As `save_on_cpu(pin_memory=True)` does: what comes back is contiguous, whatever it was."""
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor.contiguous()

    batch = BATCH.view(4, -1, WIDTH)
    model = optimized(Transposed, UNBOUNDED)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ours = step(model, [batch])
    assert not all(tensor.is_contiguous() for tensor in kept)
    close(step(make_seeded(Transposed), [batch]), ours, 1e-6)
