"""The solver's benchmark page: a function of its rows that hides neither failures nor gaps."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from autoremat_solver import check
from autoremat_solver.bounds.certified import Bounds
from autoremat_solver.model.indexed import index
from autoremat_solver.plans.heuristics import save_all

from tests.solver.test_solver_networks import transformer

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import solver_ablation
import solver_benchmark_page as benchmark_page
import solver_benchmark_worker as worker

DOCS = Path(__file__).parents[2] / "docs"
Row = dict[str, Any]
MIB = 2**20
RUN = {
    "date": "2026-01-01",
    "command": "python docs/solver_benchmarks.py",
    "threads": 1,
    "time_limit": 10.0,
    "timeout": 300.0,
    "cpu": "a processor",
    "cores": 2,
    "memory_gib": 24,
    "system": "Linux",
    "versions": {"python": "3.12.0", "highspy": "1.10.0"},
}


def row(section: str, graph: str, share: float | None, strategy: str = "", **changes: Any) -> Row:
    """A row of a plan at half of the baseline's peak, 10 % slower than it, 10 % from the bound."""
    job = worker.Job(section, graph, "", share, strategy)
    figures: Row = {
        "key": job.key,
        "section": section,
        "graph": graph,
        "share": share,
        "strategy": strategy,
        "digest": "a",
        "status": "ok",
        "resident_nbytes": 100 * MIB,
        "baseline_peak_nbytes": 300 * MIB,
        "baseline_us": 1000.0,
        "budget_nbytes": 200 * MIB,
        "peak_nbytes": 190 * MIB,
        "floor_nbytes": 120 * MIB,
        "time_us": 1100.0,
        "bound_us": 1000.0,
        "gap": 0.1,
        "seconds": 2.0,
        "cpu_seconds": 1.5,
        "time_limit": 10.0,
        "outcome": "FEASIBLE",
        "method": "ILP",
    }
    return {**figures, **changes}


def page(*rows: Row) -> str:
    return benchmark_page.page([RUN], rows)


def lines_with(text: str, *parts: str) -> list[str]:
    return [line for line in text.splitlines() if all(part in line for part in parts)]


def test_a_solve_is_one_line_of_its_graphs_table() -> None:
    """Budget and peak stand without what is resident; times are relative to the baseline's."""
    (line,) = lines_with(page(row("solve", "unet", 50.0)), "| 50 % | 100.0 |")
    assert line.split(" | ")[1:] == [
        "100.0",  # budget in MiB
        "90.0",  # peak
        "45.0 %",  # of the baseline's
        "90.0 %",  # of the budget
        "10.00 %",  # extra time
        "0.00 %",  # bound
        "10.00 %",  # gap
        "2.0",
        "1.5",
        "feasible",
        "ILP |",
    ]


def test_a_budget_below_the_proven_floor_is_no_failure_of_the_solver() -> None:
    """Where no plan can exist the row says proven; where one might, the promise is broken."""
    missed = {"outcome": "INFEASIBLE", "peak_nbytes": 210 * MIB}
    impossible = row("solve", "unet", 25.0, budget_nbytes=110 * MIB, **missed)
    not_found = row("solve", "vit_12", 25.0, budget_nbytes=130 * MIB, **missed)
    text = page(impossible, not_found)
    assert lines_with(text, "| 25 % | 10.0 |", "infeasible, proven")
    (promise,) = lines_with(text, "a plan was found")
    assert promise.endswith("| 1 | 0 | solve/vit_12/25 |")
    assert not lines_with(text, "| 25 % |", "10.00 %"), "the time of a plan that does not fit"


def test_a_crash_is_named_with_its_message() -> None:
    """A point that gave no figures stands in the table and among the broken promises."""
    crashed = {
        k: v
        for k, v in row("solve", "unet", 50.0).items()
        if k in ("key", "section", "graph", "share", "strategy")
    }
    text = page({**crashed, "status": "crash", "message": "exit code 1: KeyError"})
    assert lines_with(text, "| 50 % |", "crash: exit code 1: KeyError")
    (promise,) = lines_with(text, "no point crashed")
    assert promise.endswith("| 1 | 0 | solve/unet/50 |")


def test_a_run_says_how_much_of_its_time_it_had_the_processor() -> None:
    """On a busy machine a time limit buys less: 1.5 of 2 seconds here."""
    text = page(row("solve", "unet", 50.0, run=0))
    assert lines_with(text, "- 2026-01-01,", "highspy 1.10.0", "the processor for 75 %")


def test_every_point_that_was_not_run_is_listed() -> None:
    """The list of what is missing shrinks by exactly the point that is there."""
    nothing, one = page(), page(row("solve", "unet", 50.0))
    assert lines_with(nothing, "- unet: budget 75 %, 50 %, 35 %, 25 %, floor")
    assert lines_with(one, "- unet: budget 75 %, 35 %, 25 %, floor")
    assert lines_with(nothing, "- published RL100: budget 90 %, 80 %, 70 %")
    assert lines_with(nothing, "- ablation at 50 %, greedy:", "gpt2_12", "t5_6_6")
    assert "Not run: give the folder with `--instances`." in nothing
    assert "Not run: ask for it with `--ablation`." in nothing


def test_rows_of_an_earlier_capture_are_listed() -> None:
    """A problem captured anew has other times: old solves of it do not count as run."""
    size = row("size", "unet", None)
    text = page(size, row("solve", "unet", 50.0, digest="b"), row("solve", "unet", 75.0))
    assert lines_with(text, "- solve/unet/50: from an earlier capture of the graph")
    assert not lines_with(text, "- solve/unet/75: from")


def test_published_figures_stand_beside_ours() -> None:
    """Each source has its column; where the papers report nothing it is empty."""
    text = page(row("published", "random_layered_n100", 80.0))
    (line,) = lines_with(text, "| RL100 | 80 % |")
    assert line == "| RL100 | 80 % | 10.00 % | 10.00 % | 2.0 | feasible | 2.3 % | 0.3 % |"


def test_sources_of_published_figures_are_in_the_references() -> None:
    """Keys are those of `references.md`."""
    references = (DOCS / "references.md").read_text(encoding="utf-8")
    assert benchmark_page.PUBLISHED
    for key in benchmark_page.PUBLISHED:
        assert f"**[{key}]**" in references


def test_a_strategy_that_beats_the_solver_is_named() -> None:
    """The solver contains the strategies, so a faster one alone is a defect of the solver."""
    faster = row("ablation", "unet", 50.0, "hierarchical", time_us=1090.0)
    none = row("ablation", "unet", 50.0, "uniform", status="none")
    bound = row("ablation", "unet", 50.0, benchmark_page.BOUND, time_us=1000.0)
    text = page(row("solve", "unet", 50.0), faster, none, bound)
    (promise,) = lines_with(text, "as fast as every strategy alone")
    assert promise.endswith("| 1 | 0 | ablation/unet/50/hierarchical |")
    (line,) = lines_with(text, "| unet | 50 % |")
    assert line == "| unet | 50 % | - | 9.00 % | 10.00 % | 0.00 % |"


def test_the_page_expects_what_the_scripts_can_do() -> None:
    """A graph or a strategy that the page does not know would be missing from it silently."""
    assert list(solver_ablation.STRATEGIES) == benchmark_page.STRATEGIES
    tree = ast.parse((DOCS / "solver_graphs.py").read_text(encoding="utf-8"))
    (graphs,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "GRAPHS"
    )
    assert isinstance(graphs, ast.Dict)
    assert [ast.literal_eval(key) for key in graphs.keys if key] == benchmark_page.GRAPHS


@pytest.mark.parametrize("strategy", benchmark_page.STRATEGIES)
def test_a_strategy_alone_gives_valid_plans_within_the_budget(strategy: str) -> None:
    """Each finds a plan at 60 % of the peak's range, and none is faster than the bound."""
    problem = transformer(6)
    indexed = index(problem)
    saved = solver_ablation.candidate(indexed, save_all(indexed), "save all")
    bounds = Bounds(indexed)
    budget_nbytes = int(0.6 * saved.peak_nbytes + 0.4 * bounds.floor_nbytes)
    task = solver_ablation.Task.beginning_now(indexed, budget_nbytes, 20.0)
    plan = solver_ablation.STRATEGIES[strategy](task)
    assert plan is not None
    assert plan.peak_nbytes <= budget_nbytes < saved.peak_nbytes
    assert check(problem, indexed.plan(plan.steps), budget_nbytes) == []
    assert bounds.time_us(budget_nbytes) <= plan.time_us
    assert saved.time_us < plan.time_us


def test_a_worker_answers_with_the_figures_of_a_checked_plan(tmp_path: Path) -> None:
    """A solve's row has budget, peak, time and bound, and says of which problem they are."""
    problem = transformer(3)
    file = tmp_path / "transformer.json"
    file.write_text(problem.to_json())
    found = worker.row_of(worker.Job("solve", "transformer", str(file), 70.0, time_limit=2.0))
    assert found["peak_nbytes"] <= found["budget_nbytes"] < found["baseline_peak_nbytes"]
    assert found["bound_us"] <= found["time_us"]
    assert found["digest"] == worker.digest(file.read_text())
    assert str(tmp_path) not in json.dumps(found)


def test_an_instance_whose_baseline_differs_is_refused(tmp_path: Path) -> None:
    """A file that counts live bytes differently gives figures that do not compare."""
    graph = {
        "graph": {"baseline_peak_nbytes": 5},
        "nodes": [
            {"id": 0, "name": "a", "time": 1, "nbytes": 2},
            {"id": 1, "name": "b", "time": 1, "nbytes": 3},
        ],
        "edges": [{"source": 0, "target": 1}],
    }
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(graph))
    job = worker.Job("published", "fcn8_train", str(file), 100.0, time_limit=0.0)
    assert worker.row_of(job)["baseline_peak_nbytes"] == 5
    graph["graph"] = {"baseline_peak_nbytes": 4}
    file.write_text(json.dumps(graph))
    with pytest.raises(ValueError, match="5 bytes here and 4 in the file"):
        worker.row_of(job)
