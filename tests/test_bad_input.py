"""Odd inputs, models that change, steps that fail: each works, or says why it does not.

After every failure the same model runs its next step with eager mode's gradients.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.planning import pipeline
from autoremat.session import capturing, reports
from tests.tiny import ROWS, WIDTH, Layers, Residual, rows
from tests.training import (
    UNBOUNDED,
    close,
    make_seeded,
    optimized,
    refusal,
    same,
    step,
)


def still_trains(model: nn.Module, eager: nn.Module | None = None) -> None:
    """Its next step is that of eager mode, and it runs under a plan."""
    eager = make_seeded(Residual) if eager is None else eager
    close(step(eager, (rows(),)), step(model, (rows(),)), 1e-6)
    report = autoremat.report(model)
    assert report.graphs
    assert not report.fallbacks


# --- inputs ------------------------------------------------------------------------------------

INPUTS = {
    "transposed": lambda: rows().t().contiguous().t(),
    "every other row": lambda: torch.cat([rows(), rows()])[::2],
    "every other column": lambda: rows().repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda: rows().expand(2, ROWS, WIDTH),
    "one row": lambda: rows()[:1],
    "not a number": lambda: rows().index_fill(0, torch.tensor([3]), float("nan")),
    "infinite": lambda: rows().index_fill(0, torch.tensor([3]), float("inf")),
    "no rows": lambda: rows()[:0],
}


@pytest.mark.thorough
def test_inputs_of_every_layout_and_value():
    """One model after the other input: strides, sizes, NaN and infinity as in eager mode."""
    model, eager = optimized(Residual, UNBOUNDED), make_seeded(Residual)
    for make in INPUTS.values():
        losses = [m(make()) for m in (model, eager)]
        for m, loss in zip((model, eager), losses, strict=True):
            m.zero_grad()
            loss.backward()
        torch.testing.assert_close(*losses, equal_nan=True)
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, equal_nan=True)
    assert not autoremat.report(model).fallbacks


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: (rows().to("meta"),), "device"),
        (lambda: (None,), "NoneType"),
        (lambda: (), "missing 1 required positional argument"),
    ],
    ids=["other device", "None", "none"],
)
@pytest.mark.parametrize("planned", [False, True])
def test_inputs_that_the_model_cannot_take(
    wrong: Callable[[], tuple[Any, ...]], words: str, planned: bool
):
    """Torch's own error, twice the same; the right input then trains."""
    model = optimized(Residual, UNBOUNDED)
    if planned:
        step(model, (rows(),))
    for _ in range(2):
        with pytest.raises((RuntimeError, TypeError), match=words):
            model(*wrong())
    still_trains(model)


class Selects(Residual):
    def forward(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        return super().forward(x if chosen is None else x[chosen])


def test_a_value_that_an_operation_refuses():
    """An index out of range, found only when the planned graph runs."""
    model = optimized(Selects, UNBOUNDED)
    for _ in range(2):
        with pytest.raises(IndexError, match="out of bounds"):
            model(rows(), torch.arange(ROWS) + ROWS)
    still_trains(model)


# --- a forward that raises, a compile that is interrupted --------------------------------------


class Raises(Residual):
    broken = False

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        if self.broken:
            raise ValueError("the user's own")
        return loss


@pytest.mark.parametrize("planned", [False, True])
def test_a_forward_that_raises(planned: bool):
    """The user's exception comes out as it is, before the plan and after it."""
    model = optimized(Raises, UNBOUNDED)
    if planned:
        step(model, (rows(),))
    model.broken = True
    for _ in range(2):
        with pytest.raises(ValueError, match="the user's own"):
            model(rows())
    model.broken = False
    still_trains(model)


STAGES = (
    (pipeline, "prepare"),
    (pipeline, "find_storages"),
    (pipeline, "find_constraints"),
    (pipeline, "profile_nodes"),
    (pipeline, "lower"),
    (pipeline, "Solver"),
    (pipeline, "choose_by_simulation"),
    (reports, "explain"),
    (capturing, "compile_eager"),
)


@pytest.mark.parametrize(("module", "stage"), STAGES)
def test_an_interrupted_compile(module: ModuleType, stage: str, monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C in any stage of planning comes out as itself; the next call plans."""

    def interrupted(*args: Any, **keywords: Any) -> Any:
        raise KeyboardInterrupt

    model = optimized(Residual, UNBOUNDED, strict=False)
    with monkeypatch.context() as patch:
        patch.setattr(module, stage, interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(rows()).backward()
    assert all(p.grad is None for p in model.parameters())
    still_trains(model)
    assert len(autoremat.report(model).graphs) == 1


# --- a model that changes ----------------------------------------------------------------------


@pytest.mark.thorough
def test_a_model_whose_structure_changes():
    """Layers come, go and are replaced; each structure has its own plan and eager's gradients."""
    ours, eager = optimized(Residual, UNBOUNDED), make_seeded(Residual)

    def change(how: Callable[[nn.Module], object]) -> None:
        for model in (ours, eager):
            torch.manual_seed(3)
            how(model)
        still_trains(ours, eager)

    still_trains(ours, eager)
    change(lambda m: m.layers.append(nn.Linear(WIDTH, WIDTH)))
    change(lambda m: m.layers.pop(0))
    change(lambda m: m.layers.__setitem__(1, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    change(lambda m: setattr(m.first, "weight", nn.Parameter(torch.full((WIDTH, WIDTH), 0.1))))
    change(lambda m: setattr(m.first, "bias", None))
    change(lambda m: nn.utils.parametrizations.weight_norm(m.first))
    change(lambda m: nn.utils.parametrize.remove_parametrizations(m.first, "weight"))


@pytest.mark.thorough
def test_a_model_that_outgrows_its_budget():
    """With a layer more it is refused before the step; without it, it trains again."""
    budget = refusal(Residual, (rows(),), time_limit=60.0).smallest_peak_nbytes
    model = optimized(Residual, budget, time_limit=60.0)
    before = step(model, (rows(),))
    model.zero_grad(set_to_none=True)
    model.layers.append(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(autoremat.InfeasibleBudget):
        model(rows())
    del model.layers[-1]
    gc.collect()  # the error's frames hold the layer
    same(before, step(model, (rows(),)))


def test_a_model_that_changes_its_precision():
    """`double`, `half`, `bfloat16` and back: gradients have the parameters' type."""
    ours, eager = optimized(Residual, UNBOUNDED), make_seeded(Residual)
    step(ours, (rows(),))
    for dtype, tolerance in (
        (torch.float64, 1e-12),
        (torch.float16, 1e-2),
        (torch.bfloat16, 3e-2),
        (torch.float32, 1e-5),
    ):
        x = rows(torch.float64).to(dtype)
        close(step(eager.to(dtype), (x,)), step(ours.to(dtype), (x,)), tolerance)
        assert {p.grad.dtype for p in ours.parameters()} == {dtype}
    assert not autoremat.report(ours).fallbacks


class Normalises(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.first(x)))
        return nn.functional.dropout(self.second(h), 0.3, self.training).square().mean()


@pytest.mark.filterwarnings("ignore:AR113")
def test_a_model_that_changes_its_mode():
    """Train, eval, train with one part in eval mode, twice over: statistics and masks as eager."""
    ours, eager = optimized(Normalises, UNBOUNDED), make_seeded(Normalises)

    def agree() -> None:
        close(step(eager, (rows(),)), step(ours, (rows(),)), 1e-5)

    for _ in range(2):
        agree()
        for model in (ours, eager):
            model.eval()
        agree()
        for model in (ours, eager):
            model.train().norm.eval()
        agree()
        for model in (ours, eager):
            model.train()


def test_a_model_that_is_frozen_for_a_while():
    """Without trainable parameters there is nothing to plan, nor to complain of."""
    model = optimized(Residual, UNBOUNDED, strict=True)
    model.requires_grad_(False)
    assert not model(rows()).requires_grad
    model.requires_grad_(True)
    still_trains(model)
    model.requires_grad_(False)
    assert not model(rows()).requires_grad


# --- calls of other kinds ----------------------------------------------------------------------


@pytest.mark.parametrize("planned", [False, True])
def test_inference_mode(planned: bool):
    """Runs as eager mode; a tensor made there is refused in training as in eager mode."""
    model, eager = optimized(Residual, UNBOUNDED), make_seeded(Residual)
    if planned:
        step(model, (rows(),))
    with torch.inference_mode():
        x = rows()
        assert torch.equal(model(x), eager(x))
    for m in (eager, model):
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            m(x).backward()
    still_trains(model)


def test_calls_from_several_threads():
    """Four first calls at once: one plan, four right gradients."""
    model, eager = optimized(Residual, UNBOUNDED), make_seeded(Residual)
    batches = [(number + 1) * rows() for number in range(4)]
    found: dict[int, tuple[Tensor, ...]] = {}

    def run(number: int) -> None:
        found[number] = torch.autograd.grad(model(batches[number]), list(model.parameters()))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, batch in enumerate(batches):
        wanted = torch.autograd.grad(eager(batch), list(eager.parameters()))
        torch.testing.assert_close(found[number], wanted)
    assert len(autoremat.report(model).graphs) == 1


def test_weights_loaded_in_place_and_assigned():
    """`load_state_dict` after planning, with `assign=True` too: the next step reads them."""
    model, donor = optimized(Residual, UNBOUNDED), Residual()
    step(model, (rows(),))
    for assign in (False, True):
        state = {name: (1 + assign) * value for name, value in donor.state_dict().items()}
        model.load_state_dict(state, assign=assign)
        eager = make_seeded(Residual)
        eager.load_state_dict(state)
        model.requires_grad_(True)
        still_trains(model, eager)


def test_a_forward_that_is_replaced_on_the_class(monkeypatch: pytest.MonkeyPatch):
    """As libraries do that patch models: the next step is the new one, planned."""
    ours, eager = optimized(Residual, UNBOUNDED), make_seeded(Residual)
    before = step(ours, (rows(),))
    forward = Residual.forward
    monkeypatch.setattr(Residual, "forward", lambda self, x: forward(self, 3 * x))
    changed = step(ours, (rows(),))
    close(step(eager, (rows(),)), changed, 1e-6)
    assert not torch.equal(before.loss, changed.loss)
    assert autoremat.report(ours).graphs
    monkeypatch.undo()
    close(before, step(ours, (rows(),)), 1e-6)


def _changed_after_the_forward(model: nn.Module, name: str) -> dict[str, Tensor | None] | None:
    """Gradients of a step in which a parameter doubles before the backward; None if refused."""
    loss = model(rows())
    with torch.no_grad():
        model.get_parameter(name).mul_(2.0)
    try:
        loss.backward()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return None
    return {n: parameter.grad for n, parameter in model.named_parameters()}


@pytest.mark.thorough
@pytest.mark.parametrize("budget", ["roomy", "smallest"])
@pytest.mark.parametrize("name", ["layers.0.weight", "layers.1.weight", "layers.1.bias"])
def test_weights_that_change_between_forward_and_backward(name: str, budget: str):
    """The gradients of the old weights, or autograd's own error, which eager mode has as well."""
    nbytes = UNBOUNDED
    if budget == "smallest":
        nbytes = refusal(Residual, (rows(),), time_limit=60.0).smallest_peak_nbytes
    found = _changed_after_the_forward(optimized(Residual, nbytes, time_limit=60.0), name)
    if _changed_after_the_forward(make_seeded(Residual), name) is None:
        assert found is None
    if found is not None:
        expected = step(make_seeded(Residual), (rows(),)).gradients
        for parameter, gradient in found.items():
            torch.testing.assert_close(gradient, expected[parameter])
