"""The peak as a formula: what `simulate` finds, at every size of the range."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from autoremat_solver import simulate
from torch import Tensor, nn

import autoremat
from autoremat import offline
from autoremat.ask.options import Offline
from autoremat.planning.choice import TORCH
from autoremat.planning.formula import peak_formula
from autoremat.planning.part import Part
from autoremat.planning.sizes import sizes_of, subject_at
from autoremat.problem.lower import without_spare_states
from autoremat.reporting import PeakFormula, Piece, Report, ReportError, SizeSymbol, Term
from tests.sizing.test_fit import Convolutions, Layers, Words, images, rows, words


def planned(model: nn.Module, batch, budget, varying, device: str = "A100 80GB") -> Part:
    args, keywords = ((batch,), {}) if isinstance(batch, Tensor) else ((), batch)
    home, options = offline.asked(
        model.train(), device, None, budget=budget, compiler="eager", verbose=False, time_limit=2.0
    )
    step = offline.OfflineStep(model, (args, keywords), None, home, Offline(varying=varying))
    session = offline.planned_session(options, step)
    return session.steps.graphs.current[0]


def simulated(part: Part, sizes: dict[str, int], formula: PeakFormula) -> int:
    names = [symbol.name for symbol in formula.symbols]
    numbers = {
        s: sizes[name]
        for s, name in zip(sorted(sizes_of(part.subject), key=str), names, strict=True)
    }
    problem = subject_at(part.subject, numbers).lowered.problem
    plan = part.choice.solution.plan
    return simulate(without_spare_states(problem, plan), plan).peak_nbytes


@pytest.mark.parametrize(
    ("model", "batch", "budget", "varying"),
    [
        (Layers, rows(12), 30_000, ((0, 0),)),
        (Words, words(6), 140_000, ((0, 0),)),
        pytest.param(Words, words(6), 140_000, ((0, 1),), marks=pytest.mark.thorough),
        (Words, words(6), 140_000, ((0, 0), (0, 1))),
        (Convolutions, images(6), 70_000, ((0, 0), (1, 0))),
    ],
    ids=["layers", "batch", "sequence", "batch and sequence", "convolutions"],
)
def test_the_formula_is_what_simulate_finds_at_every_size(model, batch, budget, varying):
    """On a grid over the whole range, to the byte."""
    part = planned(model(), batch, budget, varying)
    formula = peak_formula(part.subject, part.choice.solution.plan)
    assert formula is not None
    extents = [
        sorted({*range(s.lowest, (s.highest or 40) + 1, 3), s.highest or 40})
        for s in formula.symbols
    ]
    for numbers in itertools.islice(itertools.product(*extents), 60):
        sizes = dict(zip((s.name for s in formula.symbols), numbers, strict=True))
        assert formula.at(**sizes) == simulated(part, sizes, formula), sizes


def test_no_piece_is_left_that_is_never_the_highest():
    part = planned(Layers(), rows(12), 30_000, ((0, 0),))
    formula = peak_formula(part.subject, part.choice.solution.plan)
    assert formula is not None
    (symbol,) = formula.symbols
    assert symbol.highest is not None, "the budget bounds it"
    heights = [formula.pieces_at(batch=n) for n in range(symbol.lowest, symbol.highest + 1)]
    ever = {row.index(max(row)) for row in heights}
    assert ever == set(range(len(formula.pieces)))


def test_a_marked_size_gives_the_report_a_formula():
    """In text, page and JSON, which gives it back."""
    batch = rows(12)
    torch._dynamo.mark_dynamic(batch, 0)
    report = autoremat.plan(
        Layers().train(), batch, budget=30_000, device="A100 80GB", compiler="eager", verbose=False
    )
    formula = report.peak_formula
    assert formula is not None
    assert formula.at() == report.predicted_peak_nbytes
    assert f"peak = {formula.text()}, as simulated" in report.summary()
    assert formula.text() in report.to_html()
    assert Report.from_json(report.to_json()) == report


def test_a_step_of_fixed_sizes_has_none():
    part = planned(Layers(), rows(12), 30_000, ())
    assert peak_formula(part.subject, part.choice.solution.plan) is None


@pytest.mark.thorough
def test_a_compiled_step_of_varying_sizes_has_one():
    torch._dynamo.reset()
    model = autoremat.optimize(
        Layers().train(), "1MB", compiler="eager", verbose=False, time_limit=2.0
    )
    batch = rows(12)
    torch._dynamo.mark_dynamic(batch, 0)
    model(batch).backward()
    formula = autoremat.report(model).peak_formula
    assert formula is not None
    assert formula.at(batch=24) > formula.at(batch=12)


def test_sizes_out_of_range_and_unknown_ones_are_refused():
    formula = PeakFormula(
        (SizeSymbol("batch", "x.size(0)", 8, 2, 64),),
        (Piece((Term("100", "batch"), Term("7", "1")), "mm", "forward"),),
    )
    assert formula.at() == 807
    assert formula.at(batch=64) == 6407
    assert formula.text() == "100 B * batch + 7 B"
    assert formula.legend() == "batch from 2 to 64 is x.size(0)"
    assert formula.row("batch")[-1] == (64, 6407)
    with pytest.raises(ValueError, match="holds from 2 to 64"):
        formula.at(batch=65)
    with pytest.raises(ValueError, match="it is over batch"):
        formula.at(rows=3)
    for nbytes, each in (("x", "1"), ("1", "open('file')"), ("1/0", "1"), ("1", "batch or 1")):
        with pytest.raises(ReportError, match="is no term"):
            Term(nbytes, each)
    with pytest.raises(ReportError, match="has pieces"):
        PeakFormula(formula.symbols, ())


def test_a_size_of_the_same_name_follows_unless_it_is_given():
    formula = PeakFormula(
        (
            SizeSymbol("batch", "x.size(0)", 8, 2, 64),
            SizeSymbol("y_0", "y.size(0)", 8, 2, 32, follows="batch"),
        ),
        (Piece((Term("100", "batch"), Term("1", "y_0")), "mm", "forward"),),
    )
    assert formula.at() == 808
    assert formula.at(batch=16) == 1616
    assert formula.at(batch=16, y_0=4) == 1604
    assert formula.row("batch")[-1] == (32, 3232)
    assert formula.at(batch=64, y_0=32) == 6432
    with pytest.raises(ValueError, match="y_0=33 is out of range: it holds from 2 to 32"):
        formula.at(batch=33)
    assert "y_0 from 2 to 32 is y.size(0), batch unless you say otherwise" in formula.legend()


class Halves(nn.Module):
    """Half of the rows, rounded down."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.layer(x))
        return F.gelu(F.avg_pool1d(x.T, 2).T.contiguous() * 2).square().mean()


def test_sizes_that_are_rounded_stay_exact():
    part = planned(Halves(), torch.randn(9, 8), 1_000_000, ((0, 0),))
    formula = peak_formula(part.subject, part.choice.solution.plan)
    assert formula is not None
    for size in range(4, 30):
        assert formula.at(batch=size) == simulated(part, {"batch": size}, formula)


def test_torch_s_own_partition_has_room_to_grow_too():
    """Where it is the fastest that fits, its operations are other ones than those planned."""
    x = rows(64)
    torch._dynamo.mark_dynamic(x, 0)
    report = autoremat.plan(Layers().train(), x, budget="1GB", verbose=False, time_limit=2.0)
    (graph,) = report.graphs
    assert graph.method == TORCH
    formula = report.peak_formula
    assert formula is not None
    (size,) = formula.symbols
    assert formula.at(**{size.name: size.highest}) <= report.budget_nbytes
    assert formula.at(**{size.name: 64}) == report.predicted_peak_nbytes


class Squared(nn.Module):
    """Its loss is a number in memory for all that it is one of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(F.gelu(self.layer(x)), x)


def test_what_a_loss_takes_beyond_its_number_grows_as_well():
    part = planned(Squared(), torch.randn(9, 8), 1_000_000, ((0, 0),))
    formula = peak_formula(part.subject, part.choice.solution.plan)
    assert formula is not None
    for size in (2, 9, 30):
        assert formula.at(batch=size) == simulated(part, {"batch": size}, formula)
