"""A loop of one's own with `accelerate`: before `prepare` or after, its trackers, `save_state`."""

from __future__ import annotations

import gc
import warnings
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.memory.meter import measuring_peak, resident_nbytes
from autoremat.planning import pipeline

accelerate = pytest.importorskip("accelerate")

from accelerate.tracking import GeneralTracker  # noqa: E402
from accelerate.utils import find_executable_batch_size  # noqa: E402

from autoremat.integrations import followed  # noqa: E402
from autoremat.integrations.accelerate import Following, attach  # noqa: E402
from autoremat.integrations.followed import PAGE, PLAN, REPORT  # noqa: E402

# Dynamo looks at `.grad` of what it resumes with after a graph break.
pytestmark = [
    pytest.mark.shares_plans,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

ROWS, WIDTH, STEPS = 256, 32, 4
BUDGET_NBYTES = 500_000
QUICK = {"compiler": "eager", "verbose": False, "time_limit": 4.0}


class Net(nn.Module):
    """Layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layers(x) - x).square().mean()


class Listed(GeneralTracker):
    """A tracker that keeps what it is given."""

    name, requires_logging_directory, tracker = "listed", False, None

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[int, dict[str, float]] = {}

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
        assert step is not None
        self.entries.setdefault(step, {}).update(values)

    def of(self, name: str) -> list[float]:
        """All figures of a name."""
        return [entry[name] for entry in self.entries.values() if name in entry]


class Loop:
    """A training script that evaluates now and then."""

    def __init__(self, *trackers: Any, rows: int = ROWS, **given: Any) -> None:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = accelerate.Accelerator(
            cpu=True, log_with=list(trackers) or None, **given
        )
        self.accelerator.init_trackers("run")
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(1)
        data = torch.randn(2 * STEPS * rows, WIDTH, generator=generator)
        self.loader = torch.utils.data.DataLoader(data, batch_size=rows)

    def prepare(self) -> None:
        prepared = self.accelerator.prepare(self.model, self.optimizer, self.loader)
        self.model, self.optimizer, self.loader = prepared

    def attach(self, budget: int | None = BUDGET_NBYTES, **given: Any) -> Following:
        options = {"log_every": 1, **QUICK, **given}
        return attach(self.accelerator, self.model, self.optimizer, budget, **options)

    def train(self, batches: int = 2 * STEPS) -> Tensor:
        for number, batch in enumerate(self.loader):
            if number == batches:
                break
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(batch))
                self.optimizer.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                with torch.no_grad():
                    self.model.eval()(batch.repeat(8, 1))  # above the budget, between two steps
                self.model.train()
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_loop_is_planned_and_logged(is_prepared: bool) -> None:
    """With the optimizer's state from the first step on, before `prepare` as after it."""
    plain = Loop(gradient_accumulation_steps=2)
    plain.prepare()
    tracker = Listed()
    loop = Loop(tracker, gradient_accumulation_steps=2)
    if is_prepared:
        loop.prepare()
    loop.attach()
    if not is_prepared:
        loop.prepare()
    with warnings.catch_warnings():
        warnings.simplefilter("error", autoremat.OverBudgetWarning)
        weights = loop.train()
    torch.testing.assert_close(weights, plain.train(), rtol=0, atol=1e-4)
    report = autoremat.report(loop.accelerator.unwrap_model(loop.model))
    assert report.optimizer == "AdamW"
    assert report.baseline_peak_nbytes > BUDGET_NBYTES
    assert list(tracker.entries) == [1, 2, 3, 4], "steps of the optimizer, not batches"
    peaks = tracker.of("autoremat/measured_peak_bytes")
    assert 0 < len(peaks) < STEPS, "all but those that compile"
    assert 0.8 * BUDGET_NBYTES < max(peaks) <= BUDGET_NBYTES
    assert tracker.of("autoremat/budget_bytes") == [BUDGET_NBYTES] * STEPS
    assert all(ms > 0 for ms in tracker.of("autoremat/measured_step_ms"))
    assert all(ms > 0 for ms in tracker.of("autoremat/predicted_step_ms"))


@pytest.mark.parametrize("is_attached_first", [False, True])
def test_a_model_that_is_wrapped_twice_is_planned_once(is_attached_first: bool) -> None:
    """By hand, and by two accelerators under autocast: what is inside all of it is one model."""

    def wrapped(loop: Loop) -> None:
        loop.model = nn.DataParallel(nn.DataParallel(loop.model))
        loop.prepare()
        accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(loop.model, loop.optimizer)
        loop.prepare()

    plain, tracker = Loop(mixed_precision="bf16"), Listed()
    wrapped(plain)
    loop = Loop(tracker, mixed_precision="bf16")
    budget = 350_000
    if is_attached_first:
        loop.attach(budget)
        wrapped(loop)
    else:
        wrapped(loop)
        loop.attach(budget)
    with warnings.catch_warnings():
        warnings.simplefilter("error", autoremat.OverBudgetWarning)
        weights = loop.train(STEPS)
    torch.testing.assert_close(weights, plain.train(STEPS), rtol=0, atol=1e-3)
    report = autoremat.report(loop.accelerator.unwrap_model(loop.model))
    assert not report.fallbacks
    assert report.baseline_peak_nbytes > budget
    assert list(tracker.entries) == [1, 2, 3, 4], "each step once"
    peaks = tracker.of("autoremat/measured_peak_bytes")
    assert 0.8 * budget < max(peaks) <= budget


def test_a_resumed_run_plans_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan and report lie in what `save_state` writes; steps are counted on."""
    first = Loop()
    first.prepare()
    first.attach()
    first.accelerator.save_state(tmp_path / "early")  # nothing is planned yet, nor warned of
    first.train(2)
    first.accelerator.save_state(tmp_path / "two")
    assert all((tmp_path / "two" / name).exists() for name in (PLAN, REPORT, PAGE))
    assert not (tmp_path / "early" / PLAN).exists()
    torch._dynamo.reset()
    searched = []
    search = pipeline.search
    monkeypatch.setattr(pipeline, "search", lambda *a, **k: searched.append(a) or search(*a, **k))
    tracker = Listed()
    again = Loop(tracker)
    following = again.attach()
    again.prepare()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        again.accelerator.load_state(tmp_path / "two")
        again.train(2)
    assert not searched
    assert following.steps == 4
    assert list(tracker.entries) == [3, 4]
    assert tracker.of("autoremat/measured_peak_bytes")


def test_a_run_that_is_resumed_with_another_batch_says_why_it_plans(tmp_path: Path) -> None:
    """The line names the first operation that differs."""
    first = Loop()
    first.prepare()
    first.attach()
    first.train(1)
    first.accelerator.save_state(tmp_path)
    torch._dynamo.reset()
    again = Loop(rows=ROWS // 2)
    again.prepare()
    again.attach()
    again.accelerator.load_state(tmp_path)
    with pytest.warns(UserWarning, match=r"set aside for 1 of 1 graphs .*256, 32.*128, 32"):
        again.train(1)


def test_a_tracker_that_cannot_write_is_told_of_once() -> None:
    """And training goes on."""

    class Full(Listed):
        def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
            raise OSError(28, "No space left on device")

    loop = Loop(Full())
    loop.prepare()
    following = loop.attach()
    with pytest.warns(UserWarning, match="cannot be logged: OSError.*No space left") as told:
        loop.train(3)
    assert sum("cannot be logged" in str(one.message) for one in told) == 1
    assert following.steps == 3


def test_another_version_of_accelerate_is_told_of_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, as the loop is attached to."""
    monkeypatch.setattr(followed, "TESTED", {"accelerate": ("0.1", "0.2")})
    loop = Loop()
    loop.prepare()
    with pytest.warns(UserWarning, match=r"accelerate .* was not tested .* 0\.1 to 0\.2"):
        following = loop.attach()
    loop.train(1)
    assert following.steps == 1


def test_what_cannot_be_attached_is_refused() -> None:
    """An accelerator that compiles itself, another model's optimizer, no budget, no steps."""
    with pytest.raises(ValueError, match="dynamo_backend=INDUCTOR"):
        Loop(dynamo_backend="inductor").attach()
    loop = Loop()
    with pytest.raises(ValueError, match="log_every is a number of steps from 1 on, not 0"):
        loop.attach(log_every=0)
    with pytest.raises(ValueError, match="Give a budget"):
        loop.attach(None)
    loop.optimizer = torch.optim.SGD(Net().parameters())
    with pytest.raises(ValueError, match="None of the optimizer's"):
        loop.attach()


@pytest.mark.parametrize(
    ("way", "budget_nbytes"),
    [("optimize", 400_000), ("torch.compile", 300_000), ("attach", 400_000)],
)
def test_a_batch_above_the_budget_is_made_smaller(
    way: str, budget_nbytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """By accelerate, as where memory has run out; models that were refused are gone by then."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    tried, models, peaks = [], [], []

    @find_executable_batch_size(starting_batch_size=2 * ROWS)
    def train(rows: int) -> None:
        accelerator.free_memory()
        tried.append(rows)
        model: nn.Module = Net()
        models.append(weakref.ref(model))
        # Of an optimizer that comes late, the first step does not know the state.
        kind = torch.optim.SGD if way == "torch.compile" else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=1e-3)
        given = {"budget": budget_nbytes, **QUICK}
        if way == "optimize":
            autoremat.optimize(model, optimizer=optimizer, **given)
        elif way == "attach":
            model, optimizer = accelerator.prepare(model, optimizer)
            attach(accelerator, model, optimizer, **given)
        else:
            model = torch.compile(model, backend="autoremat", options=given)
        x = torch.randn(rows, WIDTH)
        for number in range(3):
            with measuring_peak(x.device) if number else nullcontext([]) as found:
                model(x).backward()
                optimizer.step()
                optimizer.zero_grad()
            peaks.extend(resident_nbytes(model, x, optimizer) + one for one in found)

    train()
    assert len(tried) > 1
    assert max(peaks[-2:]) <= budget_nbytes
    gc.collect()
    assert not any(model() for model in models[:-1])
    lines = [record.message for record in caplog.records if record.name == "autoremat"]
    assert len(lines) == len(tried) - 1
    assert all("goes on with a smaller batch. Budget" in line for line in lines)


def test_where_no_batch_can_fit_the_refusal_ends_the_run() -> None:
    """Parameters above the budget: none smaller is tried."""
    tried = []

    @find_executable_batch_size(starting_batch_size=ROWS)
    def train(rows: int) -> None:
        tried.append(rows)
        model = autoremat.optimize(Net(), "10kB", **QUICK)
        model(torch.randn(rows, WIDTH))

    with pytest.raises(autoremat.InfeasibleBudget):
        train()
    assert tried == [ROWS]
