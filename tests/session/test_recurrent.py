"""Recurrent layers run as in eager mode; what stands around them is planned."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import autoremat
from autoremat import OverBudgetWarning
from autoremat.fallbacks import REASONS
from autoremat.memory.meter import measure_peak, resident_nbytes
from tests.tiny import WIDTH, sequences
from tests.training import (
    UNBOUNDED,
    Outcome,
    close,
    make_seeded,
    measured,
    optimized,
    recomputes,
    same,
    step,
)

pytestmark = [
    # Dynamo looks at `.grad` of what it resumes with after a graph break.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:AR109"),
]


class Surrounded(nn.Module):
    """Residual layers, a recurrent one, and residual layers again."""

    kind: type[nn.RNNBase] = nn.LSTM

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.recurrent = self.kind(WIDTH, WIDTH, 2, batch_first=True, dropout=0.3)
        self.behind = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.before:
            x = x + torch.tanh(F.gelu(layer(x)))
        x = self.recurrent(x)[0]
        for layer in self.behind:
            x = x + torch.tanh(F.gelu(layer(x)))
        return x.square().mean()


class SurroundedGRU(Surrounded):
    kind = nn.GRU


class SurroundedRNN(Surrounded):
    kind = nn.RNN


class OwnLSTM(nn.LSTM):
    """As users write them: with something before torch's own forward."""

    def forward(self, x: Tensor, state: Any = None) -> Any:
        return super().forward(torch.tanh(x), state)


class SurroundedOwn(Surrounded):
    kind = OwnLSTM


class InCheckpoints(nn.Module):
    """Parts in checkpoints, each with a recurrent layer in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(InCheckpoint() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False)
        return x.square().mean()


class InCheckpoint(nn.Module):
    """One of these parts."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(F.gelu(self.before(x)))
        x = self.recurrent(x)[0]
        return x + torch.tanh(F.gelu(self.behind(x)))


KINDS = [Surrounded, SurroundedGRU, SurroundedRNN, SurroundedOwn]


def planned(make: type[nn.Module], budget: int) -> tuple[nn.Module, Outcome]:
    """A model after a step, told of AR109 once, or of a later graph above the budget."""
    model = optimized(make, budget, strict=False, time_limit=0.5)
    return model, step(model, (sequences(),))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::autoremat.OverBudgetWarning")  # the step is eager's in part
@pytest.mark.parametrize("make", KINDS)
def test_both_sides_are_planned_and_the_step_is_that_of_eager_mode(make: type[nn.Module]):
    """Bit for bit, masks of the layer's dropout included; more is recomputed at less memory."""
    model, roomy = planned(make, UNBOUNDED)
    same(step(make_seeded(make), (sequences(),)), roomy)
    report = autoremat.report(model)
    assert len(report.graphs) >= 2
    assert [f.code for f in report.fallbacks] == ["AR109"]
    highest = max(graph.predicted_peak_nbytes for graph in report.graphs)
    resident = report.resident.parameters_nbytes
    tight, lean = planned(make, resident + int(0.7 * (highest - resident)))
    same(roomy, lean)
    same(roomy, step(tight, (sequences(),)))  # planned for what the layer was found to take
    assert recomputes(tight) > recomputes(model)


def test_a_layer_in_a_checkpoint_is_no_end_of_it():
    """What the graphs on both sides of it save is there again together."""
    reference = step(make_seeded(InCheckpoints), (sequences(),))
    model = make_seeded(InCheckpoints)
    autoremat.optimize(list(model.parts), UNBOUNDED, compiler="eager", verbose=False)
    for _ in range(3):
        close(reference, step(model, (sequences(),)), 1e-5)
    model.zero_grad(set_to_none=True)
    resident = resident_nbytes(model, sequences())
    highest = resident + measure_peak(lambda: model(sequences()).backward(), device="cpu")
    predicted = autoremat.report(model.parts[0]).predicted_peak_nbytes
    assert highest <= predicted <= 1.1 * highest


@pytest.mark.thorough
@pytest.mark.parametrize("make", KINDS)
def test_what_the_layer_saves_is_counted(make: type[nn.Module]):
    """On a batch of which it saves more than it needs for a moment, the prediction holds."""
    batch = torch.randn(16, 16, WIDTH, generator=torch.Generator().manual_seed(1))
    model = optimized(make, UNBOUNDED, strict=False, time_limit=0.5)
    step(model, (batch,))
    predicted = autoremat.report(model).predicted_peak_nbytes
    assert 0.95 * predicted <= measured(model, (batch,)) <= predicted


@pytest.mark.thorough
@pytest.mark.parametrize("make", [Surrounded, SurroundedGRU])
def test_what_the_layer_saved_in_another_call_is_counted(make: type[nn.Module]):
    """No backward reaches that call, whose output is held."""
    batch = torch.randn(16, 16, WIDTH, generator=torch.Generator().manual_seed(1))

    def take(model: nn.Module) -> None:
        held = model(batch)
        model(batch).backward()
        del held

    plain = make_seeded(make)
    highest = resident_nbytes(plain, batch) + measure_peak(lambda: take(plain), device="cpu")
    model = optimized(make, int(0.8 * highest), strict=False, policy="save-all")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        take(model)
    named = [w.message.predicted_nbytes for w in caught if w.category is OverBudgetWarning]
    assert 0.95 * highest <= max(named) <= 1.1 * highest


class Several(InCheckpoints):
    """The same parts, in no checkpoints, each with dropout in its recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        for part in self.parts:
            part.recurrent = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x.square().mean()


@pytest.mark.filterwarnings("ignore::autoremat.OverBudgetWarning")  # in the steps before
def test_where_no_plan_keeps_the_budget_the_layers_run_again():
    """They draw the same masks again: gradients have the bits of the step in which none does."""
    batch = torch.randn(16, 16, WIDTH, generator=torch.Generator().manual_seed(1))
    plain = make_seeded(Several)
    resident = resident_nbytes(plain, batch)
    highest = measure_peak(lambda: plain(batch).backward(), device="cpu")
    budget = resident + int(0.6 * highest)
    model = optimized(Several, budget, strict=False, time_limit=0.5)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        step(model, (batch,))
    assert measured(model, (batch,)) <= budget
    roomy = optimized(Several, UNBOUNDED, strict=False, time_limit=0.5)
    same(step(roomy, (batch,)), step(model, (batch,)))


class LargeBetween(nn.Module):
    """A recurrent layer of large weights behind a layer of large weights."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, 1024)
        self.recurrent = nn.RNN(1024, 128, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(torch.tanh(self.before(x)))[0].square().mean()


def test_the_layers_gradients_are_live_in_the_backward_before_it():
    """On a batch of one row, they decide the peak."""
    batch = torch.randn(1, 1, WIDTH, generator=torch.Generator().manual_seed(1))
    model = optimized(LargeBetween, UNBOUNDED, strict=False, time_limit=0.5)
    step(model, (batch,))
    predicted = autoremat.report(model).predicted_peak_nbytes
    assert 0.95 * predicted <= measured(model, (batch,)) <= predicted


class Packed(nn.Module):
    """Sequences of two lengths, read in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.behind = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(torch.tanh(self.before(x)), [16, 9], batch_first=True)
        y, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        return torch.tanh(self.behind(y)).square().mean()


def test_packed_sequences():
    """They go in and come out as in eager mode."""
    model, ours = planned(Packed, UNBOUNDED)
    same(step(make_seeded(Packed), (sequences(),)), ours)
    assert len(autoremat.report(model).graphs) == 2


def test_strict_refuses_what_is_not_planned():
    """As for every other fallback; the model trains on without autoremat."""
    model = optimized(Surrounded, UNBOUNDED)
    with pytest.raises(autoremat.FallbackError, match=r"AR109.*LSTM"):
        step(model, (sequences(),))


def test_it_is_told_once():
    """Not at each step, and not for each layer of the kind."""
    with pytest.warns(autoremat.FallbackWarning, match=r"AR109.*type LSTM"):
        model, _ = planned(Surrounded, UNBOUNDED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, (sequences(),))


def test_torchs_classes_stay_as_they_are():
    """Other models see nothing of it, also after a step that failed."""
    before = nn.LSTM.forward
    model, _ = planned(Surrounded, UNBOUNDED)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 16, WIDTH + 1))
    assert nn.LSTM.forward is before
    assert not torch._dynamo.config.allow_rnn


@pytest.mark.parametrize("make", [Surrounded, SurroundedOwn])
def test_a_users_forward_of_the_class_is_run_and_stays(
    make: type[nn.Module], monkeypatch: pytest.MonkeyPatch
):
    """Also where it was put there after a model was optimised, or between two calls."""
    model, _ = planned(make, UNBOUNDED)
    torchs, calls = nn.LSTM.forward, []

    def forward(layer: nn.LSTM, *args: Any) -> Any:
        calls.append(layer)
        return torchs(layer, *(2 * x for x in args[:1]), *args[1:])

    monkeypatch.setattr(nn.LSTM, "forward", forward)
    ours = step(model, (sequences(),))
    assert calls == [model.recurrent]
    assert nn.LSTM.forward is forward
    same(step(make_seeded(make), (sequences(),)), ours)


def test_a_users_own_function_for_one_layer_is_run():
    """An attribute of the layer, which calls the class's."""
    model = optimized(Surrounded, UNBOUNDED, strict=False, time_limit=0.5)
    plain = make_seeded(Surrounded)
    for each in (model, plain):
        each.recurrent.forward = lambda x, layer=each.recurrent: nn.LSTM.forward(layer, 2 * x)
    same(step(plain, (sequences(),)), step(model, (sequences(),)))


def test_a_user_who_has_dynamo_trace_them_gets_them_planned():
    """By the option that AR109 names: one graph, the time steps in it."""
    assert "torch._dynamo.config.allow_rnn = True" in REASONS["AR109"].remedy
    with torch._dynamo.config.patch(allow_rnn=True):
        model = optimized(SurroundedRNN, UNBOUNDED, time_limit=0.5)
        ours = step(model, (sequences()[:, :4],))
    assert len(autoremat.report(model).graphs) == 1
    assert ours.gradients["recurrent.weight_hh_l1"] is not None


def test_a_model_that_ends_in_a_recurrent_layer():
    """Its loss outside: what stands before is planned, no other word is said."""

    class Ends(Surrounded):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.before:
                x = x + torch.tanh(F.gelu(layer(x)))
            return self.recurrent(x)[0]

    model, ours = planned(Ends, UNBOUNDED)
    close(step(make_seeded(Ends), (sequences(),)), ours, 0.0)
    assert len(autoremat.report(model).graphs) == 1


def test_planning_without_a_step():
    """`plan` sees both sides as well."""
    model = make_seeded(Surrounded)
    report = autoremat.plan(
        model, sequences(), budget=UNBOUNDED, compiler="eager", time_limit=0.5, verbose=False
    )
    assert len(report.graphs) == 2
    assert [f.code for f in report.fallbacks] == ["AR109"]
