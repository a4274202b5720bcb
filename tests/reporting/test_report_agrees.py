"""Numbers of a report that have two sources are the same by both.

Eleven kinds of models, each planned once under each compiler with room and at its smallest peak. Of
Inductor most take a minute together and are left to `pytest -m slow`.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from autoremat_solver.plan import Status
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoremat
from autoremat.inductor.laid_out import LAID_OUT
from autoremat.planning.choice import TORCH, Choice, as_chosen
from autoremat.planning.figures import Figures
from autoremat.planning.nesting import Beside
from autoremat.planning.ways import crossing_nbytes
from autoremat.problem.lower import RNG_STATE, without_spare_states
from autoremat.problem.shell import LATER_GRADIENTS
from autoremat.problem.subject import Subject
from autoremat.reporting import GraphReport, Report, SpanKind, ValueAction
from autoremat.session import reports
from autoremat.units import format_nbytes, format_us
from tests.inductor.test_inductor import Encoder, Normalised
from tests.inductor.test_inductor import images as doubles
from tests.models import example_gpt
from tests.tiny import WIDTH, Chain, Dropout, Layers, Residual, many_rows, rows, sequences

# Dynamo looks at `.grad` of what it resumes with after a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Attention(nn.Module):
    """Attention without dropout, with a norm in front."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norm(x)).chunk(3, dim=-1)
        return F.mse_loss(x + F.scaled_dot_product_attention(q, k, v), torch.zeros_like(x))


class Unrolled(Layers):
    """One cell run five times: weights shared, and gradients of all runs added up."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x)
        for _ in range(5):
            h = torch.tanh(self.first(x) + self.second(h))
        return h.square().mean()


class SeveralOutputs(Layers):
    """Features, scores and a decision; the loss is the training loop's."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = torch.tanh(self.first(x))
        scores = self.second(F.gelu(features))
        return {"features": features, "scores": scores, "best": scores.topk(2).values}


class Checkpointed(Layers):
    """Regions that the user recomputes already."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(lambda h, one=layer: F.gelu(one(h)), x, use_reentrant=False)
        return F.mse_loss(x, torch.zeros_like(x))


class Broken(Layers):
    """Two graphs, the second inside the first's step."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return torch.tanh(self.second(x)).square().mean()


def gpt() -> tuple[nn.Module, tuple[Any, ...]]:
    """The example GPT of two layers."""
    case = example_gpt(layers=2, batch=2)
    return case.model, case.inputs


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "mlp": lambda: (Chain(), (many_rows(),)),
    "residual": lambda: (Residual(), (rows(),)),
    "dropout": lambda: (Dropout(), (many_rows(),)),
    "attention": lambda: (Attention(), (sequences(),)),
    "tied encoder": lambda: (Encoder(), (torch.randint(50, (8, 64)),)),
    "convolutions": lambda: (Normalised(), (doubles(),)),
    "unrolled": lambda: (Unrolled(), (rows(),)),
    "several outputs": lambda: (SeveralOutputs(), (rows(),)),
    "checkpointed": lambda: (Checkpointed(), (many_rows(),)),
    "two graphs": lambda: (Broken(), (rows(),)),
    "gpt": gpt,
}
QUICK = ("residual", "checkpointed")  # of Inductor: no time of its own for more
MINUTES = frozenset(CASES) - {*QUICK, "tied encoder"}
WITH_ROOM = 1 << 40


@dataclass(frozen=True)
class Planned:
    """A report, and for each of its graphs what it was made from."""

    report: Report
    made_from: tuple[tuple[Subject, Choice], ...]

    @property
    def graphs(self) -> list[tuple[GraphReport, Subject, Choice]]:
        """What belongs together; the subject with the problem that the plan is one of."""
        pairs = zip(self.report.graphs, self.made_from, strict=True)
        return [(graph, as_chosen(subject, choice), choice) for graph, (subject, choice) in pairs]


@functools.cache
def planned(name: str, compiler: str, budget: int) -> Planned | int:
    """The plan of a case; the smallest peak where the budget is refused."""
    seen: dict[str, tuple[Subject, Choice]] = {}
    original = reports.explain

    def recording(
        name: str, subject: Subject, plain: Subject, choice: Choice, *asked: Any
    ) -> GraphReport:
        seen[name] = (subject, choice)
        return original(name, subject, plain, choice, *asked)

    torch.manual_seed(0)
    model, inputs = CASES[name]()
    options: dict[str, Any] = {"compiler": compiler, "time_limit": 2.0, "verbose": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "explain", recording)
        try:
            report = autoremat.plan(model.train(), *inputs, budget=budget, **options)
        except autoremat.InfeasibleBudget as refusal:
            return refusal.smallest_peak_nbytes
    return Planned(report, tuple(seen[graph.name] for graph in report.graphs))


def _marks(name: str, compiler: str) -> list[pytest.MarkDecorator]:
    if compiler == "eager":
        return []
    more = [] if name in QUICK else [pytest.mark.slow if name in MINUTES else pytest.mark.thorough]
    return [pytest.mark.inductor, *more]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, marks=_marks(*case[:2]), id="-".join(case))
        for case in itertools.product(CASES, ("eager", "inductor"), ("room", "tight"))
        if case[::2] != ("two graphs", "tight")  # the smallest peak of the first is not the step's
    ],
)
def found(request: pytest.FixtureRequest) -> Planned:
    """A case, planned with room or at its smallest peak."""
    name, compiler, kind = request.param
    budget = WITH_ROOM
    if kind == "tight":
        smallest = planned(name, compiler, 1)
        assert isinstance(smallest, int)
        budget = smallest
    result = planned(name, compiler, budget)
    assert isinstance(result, Planned)
    return result


def test_a_value_has_one_size(found: Planned) -> None:
    """In the table of values and in the timeline."""
    compared = 0
    for graph, subject, _ in found.graphs:
        assert graph.timeline is not None
        table = {value.name: value.nbytes for value in graph.values}
        for span in graph.timeline.spans:
            root = subject.lowered.storages.root.get(span.value)
            if root is not None and root.name in table:
                assert table[root.name] == span.nbytes, span.value
                compared += 1
    assert compared


def test_what_is_saved_crosses_in_the_timeline(found: Planned) -> None:
    """And nothing else does, but what the forward returns, states of generators, and copies."""
    for graph, subject, _ in found.graphs:
        assert graph.timeline is not None
        root = subject.lowered.storages.root
        kinds: dict[SpanKind, set[str]] = {kind: set() for kind in SpanKind}
        for span in graph.timeline.spans:
            is_beside = span.value.endswith(
                (RNG_STATE, LAID_OUT)
            )  # they are no values of the graph
            if not is_beside and span.value != LATER_GRADIENTS:
                kinds[span.kind].add(root[span.value].name)
        saved = {value.name for value in graph.values if value.action is ValueAction.SAVE}
        assert kinds[SpanKind.SAVED] <= saved
        assert saved - kinds[SpanKind.SAVED] <= kinds[SpanKind.OUTPUT]


def test_what_is_recomputed_runs_again_in_the_timeline(found: Planned) -> None:
    """As often as the table says."""
    for graph, subject, _ in found.graphs:
        assert graph.timeline is not None
        runs = Counter(step.name for step in graph.timeline.steps if step.is_recompute)
        storages = subject.lowered.storages
        maker = {
            storages.root[name].name: node.name
            for node, made in storages.made_by.items()
            for name in made
            if name in storages.root
        }
        table = {maker[value.name]: value.recomputes for value in graph.values if value.recomputes}
        assert table == dict(runs)
        for value in graph.values:
            assert (value.action is ValueAction.RECOMPUTE) <= (value.recomputes > 0)


def test_peaks_and_times_are_those_of_the_timeline(found: Planned) -> None:
    """Before and after have one meter: the simulator, or the code that Inductor generates."""
    for graph, subject, choice in found.graphs:
        assert graph.timeline is not None
        assert graph.predicted_time_us == pytest.approx(
            sum(step.time_us for step in graph.timeline.steps), abs=1e-3 * len(graph.timeline.steps)
        )
        problem = without_spare_states(subject.lowered.problem, choice.solution.plan)
        assert graph.timeline.resident_nbytes == problem.resident_nbytes
        if found.report.compiler == "eager":
            assert graph.timeline.peak_nbytes == graph.predicted_peak_nbytes
            assert max(graph.timeline.baseline_live_nbytes) == graph.baseline_peak_nbytes
            assert graph.baseline_time_us == pytest.approx(
                sum(graph.timeline.baseline_step_us), abs=1e-3 * len(graph.timeline.steps)
            )
        elif graph.method == TORCH:
            assert graph.predicted_peak_nbytes == graph.baseline_peak_nbytes
            assert graph.predicted_time_us == graph.baseline_time_us


def test_status_bound_and_gap_say_the_same(found: Planned) -> None:
    """Optimal is what no gap is left of; no bound is above its plan."""
    for graph, _, choice in found.graphs:
        assert graph.status is choice.solution.status
        assert graph.gap == choice.solution.gap
        assert graph.bound_us <= graph.predicted_time_us * (1 + 1e-9)
        assert graph.status not in (Status.UNPROVEN, Status.INFEASIBLE)
        assert (graph.status is Status.OPTIMAL) == (graph.gap <= 1e-5)


def test_what_crosses_is_what_is_saved(found: Planned) -> None:
    """Added up over the backward's inputs, and as the plan has it live between the two parts."""
    for _, subject, choice in found.graphs:
        problem = without_spare_states(subject.lowered.problem, choice.solution.plan)
        figures = Figures(subject, choice, Beside())
        assert figures.crossing_nbytes == crossing_nbytes(problem, choice.solution.plan)


def test_totals_are_those_of_the_graphs(found: Planned) -> None:
    """In the fields and in the JSON."""
    report, data = found.report, json.loads(found.report.to_json())
    assert autoremat.Report.from_json(report.to_json()) == report
    for name in ("predicted_peak_nbytes", "baseline_peak_nbytes"):
        assert data[name] == max(getattr(graph, name) for graph in report.graphs)
    for name in ("predicted_time_us", "baseline_time_us", "bound_us", "solve_seconds"):
        assert data[name] == pytest.approx(sum(getattr(graph, name) for graph in report.graphs))
    assert data["gap"] == pytest.approx(
        max(0.0, data["predicted_time_us"] / data["bound_us"] - 1), abs=1e-12
    )
    assert report.is_within_budget


def test_text_and_page_show_the_fields(found: Planned) -> None:
    """The same words for the same numbers."""
    report = found.report
    before, after = (
        format_nbytes(n) for n in (report.baseline_peak_nbytes, report.predicted_peak_nbytes)
    )
    saved = sum(value.action is ValueAction.SAVE for value in report.values)
    text, page = report.summary(), report.to_html()
    verdict = text.splitlines()[0]
    assert f"{before} -> {after}" in verdict
    assert f"{saved} of {len(report.values)} values saved" in verdict
    assert f"gap at most {100 * report.gap:.1f} %" in verdict
    assert format_us(report.bound_us) in text
    for shown in (before, after, f"{saved} of {len(report.values)}", f"{100 * report.gap:.1f} %"):
        assert shown in page
    recomputed = sum(value.recomputes > 0 for value in report.values)
    assert f"{recomputed} are recomputed" in page


@pytest.mark.inductor
def test_torchs_own_partition_is_a_plan_of_its_own() -> None:
    """With room it is taken; what it runs again is in its timeline: it is not called optimal."""
    found = planned("checkpointed", "inductor", WITH_ROOM)
    assert isinstance(found, Planned)
    ((graph, _, _),) = found.graphs
    assert graph.method == TORCH
    assert graph.timeline is not None
    assert any(step.is_recompute for step in graph.timeline.steps)
    assert graph.status is Status.FEASIBLE
    assert graph.gap > 0
