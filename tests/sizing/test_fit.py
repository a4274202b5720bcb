"""`fit`: the batch for a budget, held against planning every batch, and against running it."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from autoremat_solver import Plan, check
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoremat
from autoremat.planning.unsearched import choose_fixed
from autoremat.problem.subject import Subject
from autoremat.sizing import beside
from autoremat.sizing.batches import BatchError
from autoremat.sizing.fit import FitError
from autoremat.sizing.model import Fit

pytestmark = pytest.mark.shares_plans

WIDTH = 32
GPU = "A100 80GB"


class Layers(nn.Module):
    """Three layers that keep two values each, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.square().mean()


class Broken(Layers):
    """Its loss is a graph of its own."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        torch._dynamo.graph_break()
        return x.tanh().square().mean()


class Checkpointed(Broken):
    """The user has a checkpoint already, in which numbers are drawn."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda y: F.dropout(F.gelu(self.layers[0](y))), x, use_reentrant=False)
        return super().forward(x)


class Convolutions(nn.Module):
    """With batch normalisation, which refuses one row of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)
        self.last = nn.BatchNorm1d(8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = self.last(F.relu(self.second(x)).mean((2, 3)))
        return F.cross_entropy(self.head(x), labels)


class Words(nn.Module):
    """Attention over learned positions, of which there are 24."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(64, WIDTH), nn.Parameter(torch.zeros(24, WIDTH))
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places[: ids.shape[1]]
        q, k, v = self.mix(x).chunk(3, -1)
        x = x + torch.softmax(q @ k.transpose(1, 2) / WIDTH**0.5, -1) @ v
        return F.cross_entropy(self.out(x).flatten(0, 1), ids.flatten())


def rows(size: int) -> Tensor:
    return torch.randn(size, WIDTH)


def images(size: int) -> dict[str, Tensor]:
    return {"x": torch.randn(size, 3, 8, 8), "labels": torch.zeros(size, dtype=torch.long)}


def words(size: int) -> Tensor:
    return torch.zeros(size, 16, dtype=torch.long)


def fitted(model: nn.Module, make, budget: int, **options: object) -> Fit:
    given = {"device": GPU, "compiler": "eager", "verbose": False, "time_limit": 2.0, "points": 0}
    return autoremat.fit(model, make, budget, **(given | options))  # type: ignore[arg-type]


def accepts(model: nn.Module, batch: object, budget: int) -> bool:
    inputs, keywords = ((batch,), {}) if isinstance(batch, Tensor) else ((), batch)
    try:
        autoremat.plan(
            model,
            *inputs,
            **keywords,  # type: ignore[arg-type]
            budget=budget,
            device=GPU,
            compiler="eager",
            verbose=False,
            time_limit=2.0,
        )
    except autoremat.InfeasibleBudget:
        return False
    return True


BUDGET = 45_000


@pytest.fixture(scope="module")
def found() -> Fit:
    """What several tests read: layers, with two sizes more to find the fastest."""
    return fitted(Layers().train(), rows, BUDGET, points=2, global_batch=8)


@pytest.mark.parametrize(
    ("kind", "make", "budget"),
    [
        (Layers, rows, BUDGET),
        pytest.param(Convolutions, images, 70_000, marks=pytest.mark.thorough),
        pytest.param(Words, words, 160_000, marks=pytest.mark.thorough),
    ],
)
def test_the_largest_batch_is_that_of_planning_them_all(kind, make, budget: int):
    """Every batch up to some beyond it: those below fit, those above do not."""
    model = kind().train()
    found = fitted(model, make, budget)
    largest = found.largest.size
    assert found.is_tight
    assert found.largest.plan.recompute_share > 0
    around = [n for n in range(2, largest + 3) if n > largest - 2 or n % 16 == 0]
    assert [n for n in around if accepts(model, make(n), budget)] == [
        n for n in around if n <= largest
    ]


def test_every_point_fits_and_says_what_plan_says(found: Fit):
    model = Layers().train()
    assert all(point.plan.fits and point.plan.peak_nbytes <= BUDGET for point in found.points)
    assert any(not point.plain.fits for point in found.points)
    point = found.fastest
    report = autoremat.plan(
        model,
        rows(point.size),
        budget=BUDGET,
        device=GPU,
        compiler="eager",
        verbose=False,
        time_limit=2.0,
    )
    assert report.predicted_peak_nbytes == point.plan.peak_nbytes
    assert report.baseline_peak_nbytes == point.plain.peak_nbytes
    assert report.predicted_time_us == point.plan.time_us
    assert found.fastest.per_second == max(one.per_second for one in found.points)
    assert f"the largest batch is {found.largest.size}" in found.text()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", [Layers, Broken])
def test_what_users_have_without_us_is_beside_ours(kind: type[nn.Module]):
    """Every layer again is the policy of that name, of each graph; torch's setting is said."""
    found = fitted(kind().train(), rows, BUDGET, most=200)
    for point in found.points:
        report = autoremat.plan(
            *(kind().train(), rows(point.size)),
            budget="1GB",
            policy="every-layer",
            device=GPU,
            compiler="eager",
            verbose=False,
        )
        assert point.every_layer is not None
        assert point.every_layer.peak_nbytes == report.predicted_peak_nbytes
        assert point.every_layer.time_us == pytest.approx(report.predicted_time_us)
        assert point.torch_budget is not None
        assert point.torch_budget.method in {f"torch, budget {n}" for n in (0.7, 0.5, 0.3, 0.1)}
        assert point.torch_budget.peak_nbytes <= point.plain.peak_nbytes
        assert point.torch_budget.fits == (point.torch_budget.peak_nbytes <= BUDGET)
    smallest = found.points[0].torch_budget
    assert smallest is not None
    assert (smallest.fits, smallest.method) == (True, "torch, budget 0.7")
    text, picture = found.text(), found.to_svg()
    assert "torch's budget" in text
    assert "torch&#39;s budget (torch, budget 0.7), batch" in picture


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", [Broken, Checkpointed])
def test_what_users_have_without_us_are_plans(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
):
    """What no way plans of a step keeps to what the user's checkpoints say."""
    found_by_check: list[list[str]] = []

    def checked(subject: Subject, plan: Plan, *asked: object, **more: object) -> object:
        found_by_check.append(list(map(str, check(subject.lowered.problem, plan))))
        return choose_fixed(subject, plan, *asked, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(beside, "choose_fixed", checked)
    found = fitted(kind().train(), rows, BUDGET, most=8)
    assert found_by_check
    assert not any(found_by_check)
    assert all(point.every_layer for point in found.points)


def test_a_way_that_cannot_be_compiled_is_not_beside_ours(monkeypatch: pytest.MonkeyPatch):
    def failing(*asked: object, **more: object) -> object:
        raise RuntimeError("no code")

    monkeypatch.setattr(beside, "choose_fixed", failing)
    found = fitted(Layers().train(), rows, BUDGET, most=4)
    assert set(found.points[0].ways) == {"autoremat", "plain step"}
    assert "every layer" not in found.text()


def test_the_largest_batch_runs_within_the_budget_and_the_next_is_refused():
    """Measured on the CPU, op by op."""
    model = Layers().train()
    found = fitted(model, rows, BUDGET, device="cpu")
    torch._dynamo.reset()
    options = {"compiler": "eager", "verbose": False, "time_limit": 2.0}
    autoremat.optimize(model, BUDGET, **options)
    batch = rows(found.largest.size)
    resident = autoremat.resident_nbytes(model, batch)

    def step() -> None:
        model(batch).backward()

    step()
    model.zero_grad(set_to_none=True)
    measured = resident + autoremat.measure_peak(step, device="cpu")
    assert measured <= BUDGET
    assert abs(measured - found.largest.plan.peak_nbytes) <= 0.02 * measured
    torch._dynamo.reset()
    other = autoremat.optimize(Layers().train(), BUDGET, **options)
    with pytest.raises(autoremat.InfeasibleBudget):
        other(rows(found.largest.size + 1))


@pytest.mark.thorough
def test_a_batch_of_any_size_takes_no_memory():
    """Only the first one is made: the others are fakes."""
    made: list[int] = []

    def make(size: int) -> Tensor:
        batch = rows(size)
        if type(batch) is Tensor:
            made.append(size)
        return batch

    found = fitted(Layers().train(), make, 4_000_000)
    assert found.largest.size > 4_000
    assert made == [1]


def test_random_numbers_and_gradients_of_the_user_stay_as_they_are():
    model = Layers().train()
    before = torch.random.get_rng_state()
    fitted(model, rows, BUDGET, most=2, global_batch=3)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.thorough
def test_a_global_batch_is_made_of_parts_that_fit_beside_the_gradients():
    """The second part finds the gradients of the first: less room than one part alone has."""
    model = Layers().train()
    found = fitted(model, rows, BUDGET, global_batch=256)
    parts = found.accumulation
    assert parts is not None
    assert (parts.steps - 1) * parts.size + parts.last == 256
    assert parts.size < found.largest.size
    torch._dynamo.reset()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    autoremat.optimize(model, BUDGET, compiler="eager", verbose=False, time_limit=2.0)
    batch = rows(parts.size)
    model(batch).backward()
    resident = autoremat.resident_nbytes(model, batch)
    measured = resident + autoremat.measure_peak(lambda: model(batch).backward(), device="cpu")
    assert measured <= BUDGET


def test_a_global_batch_that_fits_is_one_part(found: Fit):
    assert found.accumulation is not None
    assert (found.accumulation.size, found.accumulation.steps) == (8, 1)
    assert "fits at once" in found.text()


@pytest.mark.thorough
def test_a_reserve_stays_free():
    found = fitted(Layers().train(), rows, BUDGET, reserve=0.2, multiple_of=8)
    assert found.largest.plan.peak_nbytes <= 36_000
    assert found.reserve_nbytes == 9_000
    assert found.margin_nbytes >= 9_000
    assert all(point.size % 8 == 0 for point in found.points)
    assert found.is_tight


def test_sizes_may_have_an_end():
    few = fitted(Layers().train(), rows, BUDGET, most=5)
    assert few.largest.size == 5
    assert "No batch above most=5 was tried." in few.text()


def test_a_result_is_strict_json_csv_and_a_picture(found: Fit):
    assert found.formula is not None
    assert found.formula.at(batch=found.largest.size) == found.largest.plan.peak_nbytes
    assert found.formula.text() in " ".join(found.text().split())
    document = json.loads(found.to_json())
    assert document["schema"] == "autoremat.fit/1"
    assert document["largest"]["size"] == found.largest.size
    lines = found.to_csv().splitlines()
    assert len(lines) == 1 + sum(len(point.ways) for point in found.points)
    assert found.to_svg().startswith("<svg")
    assert (
        f"largest and fastest: {found.largest.size}" in found.to_svg()
        or "fastest: " in found.to_svg()
    )
    assert found.to_svg() in found.to_html()


# --- bad input -----------------------------------------------------------------------------------


def test_a_budget_in_which_no_batch_fits_is_refused_with_what_it_needs():
    with pytest.raises(autoremat.InfeasibleBudget) as refusal:
        fitted(Layers().train(), rows, 14_000)
    assert refusal.value.smallest_peak_nbytes > 14_000
    assert any("batch 1" in note for note in refusal.value.__notes__)


def test_a_function_that_raises_at_a_larger_size_ends_the_search_there():
    """As a data set does that has no more samples."""

    def make(size: int) -> Tensor:
        if size > 9:
            raise IndexError("only 9 samples")
        return rows(size)

    found = fitted(Layers().train(), make, BUDGET)
    assert found.largest.size == 9
    assert "make(10) raised IndexError: only 9 samples" in found.text()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda size: rows(size) if size < 3 else rows(size).double(), "of the same types"),
        (lambda size: rows(4), "returned no more than"),
        (lambda size: rows(min(size, 5)), "by what it returned for"),
        (lambda size: "rows", "returned a str"),
        (lambda size: {}, "returned no tensor"),
    ],
)
def test_a_function_that_returns_something_else_is_told_what(make, message: str):
    with pytest.raises(BatchError, match=message):
        fitted(Layers().train(), make, BUDGET)


def test_a_function_that_accepts_no_size_is_told_so():
    def make(size: int) -> Tensor:
        raise RuntimeError("no data here")

    with pytest.raises(FitError, match="no data here"):
        fitted(Layers().train(), make, BUDGET)


def test_a_sequence_beyond_the_positions_is_not_accepted():
    """The model says so itself, on fake tensors."""
    found = fitted(
        Words().train(),
        lambda size: torch.zeros(2, size, dtype=torch.long),
        1_000_000,
        over="sequence",
        least=20,
    )
    assert found.largest.size == 24
    assert "Sequence 25: the model does not accept it" in found.text()


def test_sizes_that_depend_on_numbers_are_told_as_plan_tells_them():
    """How many rows are above zero, no fake tells: nothing is planned."""

    class Above(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x[: int((x > 0).sum())]).square().mean()

    with pytest.raises(ValueError, match="Nothing can be planned: AR108"):
        fitted(Above().train(), rows, BUDGET)


def test_a_table_shorter_than_the_sequence_is_noted():
    """Whether a number is within a table, no fake tells."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids).square().mean()

    found = fitted(
        Table().train(),
        lambda size: torch.zeros(2, size, dtype=torch.long),
        1_000_000,
        over="sequence",
        most=40,
    )
    assert found.largest.size == 40
    assert "table has 10 rows" in found.text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reserve": 1.0}, "reserve is a share"),
        ({"least": 0}, "least is a whole number"),
        ({"most": 3, "multiple_of": 8}, "below the smallest size"),
        ({"points": -1}, "points is a number"),
        ({"over": ""}, "over is a word"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options, message: str):
    with pytest.raises(FitError, match=message):
        fitted(Layers().train(), rows, BUDGET, **options)


def test_a_budget_that_grows_with_the_batch_is_none():
    with pytest.raises(FitError, match="min"):
        autoremat.fit(Layers().train(), rows, "min", verbose=False)


def test_the_peak_has_a_formula_beside_an_optimizer_whose_step_allocates():
    """What its step takes is no more of a larger batch, so no such piece grows with it."""
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    found = fitted(model, rows, 200_000, optimizer=optimizer)
    assert found.formula is not None
    assert found.formula.at(batch=found.largest.size) == found.largest.plan.peak_nbytes
