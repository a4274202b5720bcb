"""The public face: what `optimize`, `report` and `verify` promise to a training script."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
import autoremat.session.session
from autoremat.graph.devices import device_nbytes
from autoremat.memory.meter import resident_nbytes
from autoremat.verification import whole_step as verification
from tests.tiny import WIDTH, Chain, many_rows
from tests.training import (
    UNBOUNDED,
    make_seeded,
    measured,
    optimized,
    peaks,
    recomputes,
    step,
)

# Dynamo looks at `.grad` of what it resumes with after a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


SHARES = (1.0, 0.75, 0.5, 0.35, 0.25)


class Attention(nn.Module):
    """Two attention layers on 4 sequences of 64 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(4, -1, WIDTH)
        for projection in self.projections:
            q, k, v = projection(self.norm(x)).view(4, -1, 3, 4, 8).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v)
            x = x + y.transpose(1, 2).reshape(x.shape)
        return x.square().mean()


class Images(nn.Module):
    """Three convolutions with batch norm on what the rows hold."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(4, 8, 16, 16)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = x + torch.relu(norm(convolution(x)))
        return x.square().mean()


class Hidden(Chain):
    """Returns the hidden states, as language models may: the user holds them."""

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        states = []
        for layer in self.layers:
            x = torch.tanh(torch.sin(layer(x)))
            states.append(x)
        return x.square().mean(), states[1:3]


class Dropping(Chain):
    """Dropout after each layer."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.2)
        return x.square().mean()


def first(output: Any) -> Tensor:
    """The loss of a model that returns more."""
    return output[0] if isinstance(output, tuple) else output


# --- the model stays the model -----------------------------------------------------------------


def test_the_module_stays_what_it_was():
    """Same object, class, keys, parameters and mode; it is compiled in place."""
    model = make_seeded(Chain)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    result = autoremat.optimize(model, UNBOUNDED, compiler="eager", verbose=False)
    assert result is model
    assert type(model) is Chain
    step(model, (many_rows(),))
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.training
    assert not model.eval().training


def test_planning_happens_at_the_first_training_call(monkeypatch):
    """Not when `optimize` is called, not in eval mode, not without gradients."""
    planned = []
    original = autoremat.session.session.Session.partition

    def counting(self: Any, *args: Any, **keywords: Any) -> Any:
        planned.append(1)
        return original(self, *args, **keywords)

    monkeypatch.setattr(autoremat.session.session.Session, "partition", counting)
    model = optimized(Chain, UNBOUNDED)
    expected = make_seeded(Chain)(many_rows())
    model.eval()
    assert torch.equal(model(many_rows()), expected)
    model.train()
    with torch.no_grad():
        assert torch.equal(model(many_rows()), expected)
    with torch.inference_mode():
        model(many_rows())
    assert not planned
    model(many_rows()).backward()
    model(many_rows()).backward()
    assert len(planned) == 1


def test_a_budget_below_the_peak_does_not_touch_eval_calls():
    """A model that could never train under the budget still evaluates."""
    model = optimized(Chain, 1).eval()
    assert model(many_rows()).shape == ()


def test_keyword_arguments_and_none():
    """Calls with other signatures are planned apart and give eager's result."""

    class Masked(Chain):
        def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
            loss = super().forward(x)
            return loss if mask is None else (loss * mask).sum()

    model, eager = optimized(Masked, UNBOUNDED), make_seeded(Masked)
    assert torch.equal(model(x=many_rows()), eager(x=many_rows()))
    mask = torch.ones(3)
    assert torch.equal(model(x=many_rows(), mask=mask), eager(x=many_rows(), mask=mask))


# --- the budget --------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("make", [Chain, Attention, Images, Hidden], ids=lambda m: m.__name__)
def test_the_measured_peak_keeps_every_budget(make: type[nn.Module]):
    """At 100, 75, 50, 35, 25 % of eager's peak above resident and at the smallest possible.

    The measured peak is at most the budget, predicted within 2 %, and falls with the budget.
    Outputs that the model returns are held while the backward runs.
    """
    inputs = (many_rows(),)
    eager = make_seeded(make)
    resident = resident_nbytes(eager, inputs)
    transient = measured(eager, inputs, first) - resident
    smallest = _smallest(make, inputs)
    budgets = [resident + int(share * transient) for share in SHARES]
    found = []
    for budget in [*(b for b in budgets if b > smallest), smallest]:
        model = optimized(make, budget)
        step(model, inputs, first)
        peak = measured(model, inputs, first)
        predicted = autoremat.report(model).predicted_peak_nbytes
        assert peak <= budget
        assert predicted <= budget
        assert abs(predicted - peak) <= 0.02 * peak
        found.append(peak)
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0]


def _smallest(make: type[nn.Module], inputs: Sequence[Any]) -> int:
    model = optimized(make, resident_nbytes(make_seeded(make), inputs))
    with pytest.raises(autoremat.InfeasibleBudget) as caught:
        step(model, inputs, first)
    return caught.value.smallest_peak_nbytes


def test_the_prediction_is_exact_with_dropout():
    """Within 2 % with six dropouts and nothing recomputed."""
    model = optimized(Dropping, UNBOUNDED)
    step(model, (many_rows(),))
    peak = measured(model, (many_rows(),))
    assert abs(autoremat.report(model).predicted_peak_nbytes - peak) <= 0.02 * peak


class Routed(Chain):
    """A higher-order operator in the middle, whose branches allocate."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layers[0](x))
        h = torch.cond(
            h.sum() > 0,
            lambda value: torch.tanh(torch.sin(self.layers[1](value))),
            lambda value: torch.sin(torch.tanh(self.layers[1](value))),
            (h,),
        )
        return torch.tanh(self.layers[2](h)).square().mean()


class Transposes(nn.Module):
    """Returns the loss and six transposed values beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = torch.tanh(self.first(x))
        loss = self.second(x[:1]).square().mean()
        return loss, *((factor * x).t() for factor in range(2, 8))


@pytest.mark.thorough
def test_the_prediction_is_exact_where_incoming_gradients_are_laid_out_anew():
    """AOTAutograd copies those that are not laid out as it expects, and holds both meanwhile."""
    model, x = optimized(Transposes, UNBOUNDED), many_rows()
    step(model, (x,), loss_alone)
    dropped = autoremat.report(model).predicted_peak_nbytes
    highest = measured(model, (x,), loss_alone)  # which holds all that is returned
    assert autoremat.report(model).predicted_peak_nbytes == highest
    outputs = 6 * x.nbytes
    assert 0 <= dropped - (highest - outputs) <= outputs // 1024 + 8


def loss_alone(output: tuple[Tensor, ...]) -> Tensor:
    """The loss among what `Transposes` returns."""
    return output[0]


@pytest.mark.thorough
@pytest.mark.xfail(
    strict=True, reason="what a higher-order operator allocates inside counts as nothing"
)
def test_the_inside_of_a_higher_order_operator_counts():
    """The branches of torch.cond allocate as well."""
    found = peaks(Routed, (many_rows(),))
    model = optimized(Routed, found.smallest)
    step(model, (many_rows(),))
    assert measured(model, (many_rows(),)) <= found.smallest


class Filtered(Chain):
    """Selects rows first, which breaks the graph before anything needs a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        x = (2 * x)[x[:, 0] > -9.0]
        return super().forward(x)


@pytest.mark.thorough
def test_inputs_of_a_graph_after_a_break_count():
    """The selected rows are live during the whole graph that reads them."""
    model = optimized(Filtered, UNBOUNDED)
    step(model, (many_rows(),))
    peak = measured(model, (many_rows(),))
    assert autoremat.report(model).predicted_peak_nbytes >= peak


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("2MB", 2_000_000), ("2MiB", 2 << 20), (3_000_000, 3_000_000), ("50%", None)],
)
def test_budgets_in_every_form(text: str | int, nbytes: int | None):
    """Powers of 1000 and of 1024, a number of bytes, a share of the device's memory."""
    model = optimized(Chain, text)
    step(model, (many_rows(),))
    expected = nbytes or device_nbytes(torch.device("cpu")) // 2
    assert autoremat.report(model).budget_nbytes == expected


@pytest.mark.parametrize(
    "budget", ["40 gigs", "", "0%", "101%", -1, 0, 1.5, float("nan"), True, None, b"1GB"], ids=repr
)
def test_malformed_budgets(budget: Any):
    """Refused at once, with the accepted forms; the model is left as it was."""
    model = make_seeded(Chain)
    with pytest.raises(ValueError, match=r"Accepted: a size such as"):
        autoremat.optimize(model, budget)
    assert model._compiled_call_impl is None


def test_other_malformed_arguments():
    """The compiler, the time limit and the model are checked when `optimize` is called."""
    with pytest.raises(ValueError, match="compiler"):
        autoremat.optimize(Chain(), UNBOUNDED, compiler="tvm")
    with pytest.raises(ValueError, match="time_limit"):
        autoremat.optimize(Chain(), UNBOUNDED, time_limit=-1)
    with pytest.raises(TypeError, match=r"nn\.Module"):
        autoremat.optimize(lambda x: x, UNBOUNDED)


def test_a_time_limit_that_is_no_number():
    """NaN seconds are refused."""
    with pytest.raises(ValueError, match="time_limit"):
        autoremat.optimize(Chain(), UNBOUNDED, time_limit=float("nan"))


# --- the report --------------------------------------------------------------------------------


def test_the_report_of_a_planned_model():
    """Every figure of the promise is there, consistent, and survives JSON."""
    budget = peaks(Chain, (many_rows(),)).at(0.3)
    model = optimized(Chain, budget)
    step(model, (many_rows(),))
    report = autoremat.report(model)
    assert report.budget_nbytes == budget
    assert report.resident_nbytes == resident_nbytes(make_seeded(Chain), many_rows())
    assert report.resident_nbytes < report.predicted_peak_nbytes <= budget
    assert report.baseline_peak_nbytes > budget
    assert report.predicted_time_us > report.baseline_time_us > 0
    assert 0 < report.bound_us <= report.predicted_time_us
    assert report.gap >= 0
    assert report.status is not None
    assert report.method
    assert report.solve_seconds > 0
    assert report.measured_peak_nbytes is None
    assert report.compiler == "eager"
    assert report.graphs[0].timeline.peak_nbytes == report.predicted_peak_nbytes
    actions = {value.action for value in report.values}
    assert {"save", "recompute"} <= actions
    recomputed = next(value for value in report.values if value.recomputes)
    assert recomputed.source.startswith("tiny.py:")
    assert re.fullmatch(r"recomputed .* to free .*B", recomputed.reason)
    saved = [value for value in report.values if value.action == "save" and value.avoided_us]
    assert saved
    for value in saved:
        assert f"avoids {'one' if value.avoided_runs == 1 else value.avoided_runs} " in value.reason
        assert value.avoided_us >= value.time_us
    assert {fact.name for fact in report.facts} >= {"autoremat", "Python", "System"}
    assert recomputed.nbytes > 0
    assert autoremat.Report.from_json(report.to_json()) == report
    assert "budget" in report.summary().lower()


class Router(nn.Module):
    """A discrete decision between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        best, _ = self.scores(x).topk(4)
        return best.square().mean()


def test_the_reason_names_what_forbids_a_recompute():
    """A decision that a tie could turn is saved whatever the budget, and the report says why."""
    model = optimized(Router, 10**9)
    step(model, (many_rows(),))
    reasons = {value.op: value.reason for value in autoremat.report(model).values}
    assert reasons["topk"] == (
        "saved, since its operation makes a discrete decision that a tie could turn"
    )


def test_the_reason_knows_what_the_training_loop_holds():
    """Saving what the model returns costs no memory: nothing has to be argued for it."""

    class Predicting(Router):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.scores(x))

    model = optimized(Predicting, 10**9)
    model(many_rows()).sum().backward()
    report = autoremat.report(model)
    reasons = {value.op: value.reason for value in report.values}
    assert reasons["tanh"] == "returned to the training loop, which holds it anyway"
    assert report.graphs[0].timeline is not None
    assert "output" in {span.kind for span in report.graphs[0].timeline.spans}


def test_the_timeline_tells_what_is_live_and_where_it_comes_from():
    """Kinds, modules of the model without a wrapper's prefix, and repeats as the plan has them."""
    budget = peaks(Chain, (many_rows(),)).at(0.3)
    model = optimized(Chain, budget)
    step(model, (many_rows(),))
    report = autoremat.report(model)
    timeline = report.graphs[0].timeline
    assert timeline is not None
    assert {"saved", "recomputed", "gradient"} <= {span.kind for span in timeline.spans}
    names = {name for name, _ in model.named_modules()}
    assert {s.module for s in timeline.steps} <= names
    assert {value.module for value in report.values} <= names
    assert any(step.is_recompute for step in timeline.steps)
    assert timeline.baseline_live_nbytes
    assert autoremat.Report.from_json(report.to_json()) == report


def test_no_report_before_a_step():
    """And none for a model that was never optimised."""
    with pytest.raises(ValueError, match="not optimised"):
        autoremat.report(Chain())
    with pytest.raises(ValueError, match="first training call"):
        autoremat.report(optimized(Chain, UNBOUNDED))


@pytest.mark.thorough
def test_a_larger_budget_is_not_slower():
    """The predicted time falls with the budget, to that of the step without recompute."""
    found = peaks(Chain, (many_rows(),))
    times = []
    for share in (0.0, 0.5, 1.0):
        model = optimized(Chain, found.at(share))
        step(model, (many_rows(),))
        times.append(autoremat.report(model).predicted_time_us)
    assert times == sorted(times, reverse=True)
    assert recomputes(model) == 0


def test_one_line_is_printed_if_verbose(capsys):
    """Progress and the summary go to one stream; silent sessions print nothing."""
    step(optimized(Chain, UNBOUNDED, verbose=True), (many_rows(),))
    shown = capsys.readouterr()
    assert "autoremat" in shown.out + shown.err
    step(optimized(Chain, UNBOUNDED, verbose=False), (many_rows(),))
    shown = capsys.readouterr()
    assert "autoremat" not in shown.out + shown.err


def test_verify_compares_with_eager_and_measures():
    """Afterwards gradients, buffers and the random stream are as they were."""
    budget = peaks(Images, (many_rows(),)).at(0.3)
    model = optimized(Images, budget)
    model(many_rows()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    buffers = copy.deepcopy(dict(model.named_buffers()))
    model.zero_grad()
    state = torch.get_rng_state()
    result = autoremat.verify(model, many_rows())
    assert result.ok, result
    assert result.within_budget
    assert result.gradients_agree
    assert result.reference == "eager"
    assert result.measured_peak_nbytes == autoremat.report(model).measured_peak_nbytes
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name])
    model(many_rows()).backward()
    assert gradients.keys() == {name for name, _ in model.named_parameters()}


class TwoHeads(nn.Module):
    """Two outputs; a loss that reads only the first leaves the second head without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.unread = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.read(x).tanh(), self.unread(x).tanh()


def test_verify_takes_no_gradient_and_a_gradient_of_zeros_for_the_same():
    """Torch passes zeros into a compiled backward where eager mode finds nothing to pass."""
    model = optimized(TwoHeads, UNBOUNDED)
    x = torch.randn(4, 8)
    result = autoremat.verify(model, x, loss_fn=lambda output: output[0].square().mean())
    assert result.gradient_error == 0.0
    model(x)[0].square().mean().backward()
    assert not model.unread.weight.grad.any()
    model.zero_grad()
    model._call_impl(x)[0].square().mean().backward()
    assert model.unread.weight.grad is None


def test_verify_finds_a_gradient_that_only_one_step_has():
    """What is no zero counts with its full size, and its parameter is named."""
    ones, none = {"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.ones(2)}
    for theirs, ours in ((ones, none), (none, ones)):
        outcomes = [verification._Outcome(0.0, gradients, {}) for gradients in (theirs, ours)]
        result = verification._compare(*outcomes)
        assert (result["gradient_error"], result["worst_gradient"]) == (1.0, "b")


def test_verify_refuses_models_in_eval_mode():
    """There is nothing to verify."""
    with pytest.raises(ValueError, match="eval"):
        autoremat.verify(optimized(Chain, UNBOUNDED).eval(), many_rows())
    with pytest.raises(ValueError, match="not optimised"):
        autoremat.verify(Chain(), many_rows())
