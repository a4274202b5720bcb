"""The solver's benchmark page: a function of its rows that hides neither failures nor gaps."""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from autoremat_solver import Plan
from autoremat_solver.bounds import certified

from tests.solver.test_solver_networks import transformer

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import solver_benchmark_page as benchmark_page
import solver_benchmark_worker as worker
import solver_experiments_page as experiments
import solver_layered_page as layered_page

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


def row(section: str, graph: str, share: float | None, without: str = "", **changes: Any) -> Row:
    """A row of a plan at half of the baseline's peak, 10 % slower than it, 10 % from the bound."""
    job = worker.Job(section, graph, "", share, without, changes.get("effort", 1.0))
    figures: Row = {
        "key": job.key,
        "section": section,
        "graph": graph,
        "share": share,
        "without": without,
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
        if k in ("key", "section", "graph", "share", "without")
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
    assert "Not run: give the folder with `--instances`." in nothing
    for option in ("--leave-one-out", "--efforts", "--repeats 20"):
        assert f"Not run: ask for it with `{option}`." in nothing


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


def test_an_earlier_solver_stands_beside_published_instances() -> None:
    """Only where it was run."""
    earlier = row("before", "random_layered_n100", 80.0, time_us=1200.0, gap=0.2)
    text = page(row("published", "random_layered_n100", 80.0), earlier)
    (line,) = lines_with(text, "| RL100 | 80 % |")
    assert line.endswith("| feasible | 20.00 % (20.00 %) | 2.3 % | 0.3 % |")


def test_sources_of_published_figures_are_in_the_references() -> None:
    """Keys are those of `references.md`."""
    references = (DOCS / "references.md").read_text(encoding="utf-8")
    assert benchmark_page.PUBLISHED
    for key in (*benchmark_page.PUBLISHED, *layered_page.PUBLISHED):
        assert f"**[{key}]**" in references


def test_a_stage_is_missed_where_the_plan_without_it_is_worse() -> None:
    """Each stage has a table of its own, and one line in that of all stages."""
    wholes = [
        row("solve", "unet", 50.0, tried=["chains", "rearrange"], cpu_seconds=3.0),
        row("solve", "vit_12", 50.0, tried=["chains"]),
        row("solve", "gpt2_12", 25.0, tried=["rearrange"]),
    ]
    worse = row("without", "unet", 50.0, "chains", time_us=1103.0)
    better = row("without", "vit_12", 50.0, "chains", time_us=1099.0, cpu_seconds=1.5)
    text = page(*wholes, worse, better)
    assert lines_with(text, "| chains |", "| 3 | 1 | 1 | +0.07 | 1.5 |")
    assert lines_with(text, "| unet | 10.30 % (+0.30) | 1.5 |")
    assert lines_with(text, "| vit_12 | 9.90 % (-0.10) | 0.0 |")
    assert "Missed in 1 of 3, hurts in 1." in text
    assert lines_with(text, "- without rearrange: ", "unet 50 %, unet 25 %, unet floor")
    assert not lines_with(text, "- without chains: ", "gpt2_12 50 %, gpt2_12 25 %")


def test_at_the_floor_the_smaller_peak_is_the_better_plan() -> None:
    """A faster plan of a higher peak misses the stage; without any plan it is missed as well."""
    whole = row("solve", "unet", None)
    faster = row("without", "unet", None, "chains", time_us=1000.0, peak_nbytes=192 * MIB)
    found = experiments.difference(faster, whole)
    assert found.points == pytest.approx(1.0)
    assert (found.text, found.peak) == ("0.00 % (-10.00)", "46.00 % (+1.00)")
    none = row("without", "unet", 50.0, "chains", outcome="INFEASIBLE")
    assert experiments.verdict(
        [found, experiments.difference(none, row("solve", "unet", 50.0))]
    ) == ("Missed in 2 of 2, hurts in 0.")


def test_a_stage_that_cannot_matter_is_not_left_out() -> None:
    """It did not run, or no plan can exist: the solve would be the same."""
    whole = row("solve", "unet", 50.0, tried=["chains"])
    assert experiments.may_differ("chains", whole)
    assert experiments.may_differ("chains", None)
    assert not experiments.may_differ("rearrange", whole)
    assert not experiments.may_differ("chains", {**whole, "budget_nbytes": 110 * MIB})


def test_effort_is_a_table_and_a_curve() -> None:
    """Effort 1 is the solve itself; the curve has a place for every effort."""
    rows = [row("solve", "bert_12", 50.0, effort=1.0, time_us=1200.0)]
    for effort in (0.1, 0.25, 0.5, 2.0, 4.0):
        rows.append(row("effort", "bert_12", 50.0, effort=effort, cpu_seconds=10 * effort))
    text = page(*rows)
    cells = ["10.00 % (1.0)", "10.00 % (2.5)", "10.00 % (5.0)", "20.00 % (1.5)"]
    assert lines_with(text, f"| bert_12 | 50 % | {' | '.join(cells)} | 10.00 % (20.0) |")
    assert "line [10.00, 10.00, 10.00, 20.00, 10.00, 10.00]" in text
    assert '"0.1: 1 s"' in text
    assert '"4: 40 s"' in text


def test_two_plans_of_one_problem_break_the_promise() -> None:
    """All conditions of a problem count together."""
    idle = row("repeat", "unet", 50.0, condition="idle", plans=["a", "a"], cpu=[1.0, 2.0])
    loaded = {**idle, "key": "b", "condition": "under load", "plans": ["a", "b"]}
    text = page(idle)
    assert lines_with(text, "| unet | 50 % | 2 | 2 | 1 | 1.0 to 2.0 |")
    assert lines_with(text, "one problem gave one plan", "| 1 | 1 |  |")
    (promise,) = lines_with(page(idle, loaded), "one problem gave one plan")
    assert promise.endswith("| 1 | 0 | repeat/unet/50 |")


def test_a_stage_that_the_time_limit_left_out_is_named() -> None:
    """Figures of a run that was cut off are not those of the solver."""
    cut = row("solve", "unet", 50.0, left_out=["rearrange"])
    (promise,) = lines_with(page(cut), "the time limit left no stage out")
    assert promise.endswith("| 1 | 0 | solve/unet/50 |")


def test_layered_graphs_of_a_size_are_one_line() -> None:
    """Mean and largest of all seeds, and what the papers report."""
    assert "Random layered graphs" not in page()
    first = row("layered", "layered_500_0", 90.0)
    second = row("layered", "layered_500_1", 90.0, time_us=1200.0, outcome="INFEASIBLE")
    third = row("layered", "layered_500_2", 90.0, time_us=1020.0, gap=0.02, cpu_seconds=2.5)
    (line,) = lines_with(page(first, second, third), "| 500 | 90 % |")
    assert line == (
        "| 500 | 90 % | 3 | 2 | 6.00 % | 10.00 % | 10.00 % | 1.5 to 2.5 | 0.70 % | 0.03 % |"
    )


def test_the_page_expects_what_the_scripts_can_do() -> None:
    """A graph that the page does not know would be missing from it silently."""
    tree = ast.parse((DOCS / "solver_graphs.py").read_text(encoding="utf-8"))
    names = {
        ast.unparse(node.target): [ast.literal_eval(key) for key in node.value.keys if key]
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
    }
    assert names["GRAPHS"] == benchmark_page.TEN
    assert names["LARGE"] == benchmark_page.LARGE


def test_a_large_graph_has_to_be_quick_and_close_to_the_bound() -> None:
    """Both count at every percentage; the floor is not asked for."""
    quick = row("solve", "gpt2_48", 50.0, gap=0.009)
    slow = row("solve", "gpt2_96", 50.0, gap=0.009, cpu_seconds=11.0)
    far, floor = row("solve", "llama_96", 25.0), row("solve", "llama_96", None)
    (promise,) = lines_with(page(quick, slow, far, floor), "10 s of the processor")
    assert promise.endswith("| 3 | 1 | solve/gpt2_96/50; solve/llama_96/25 |")


@pytest.fixture
def short_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker says does not depend on how long a bound is proven."""
    monkeypatch.setattr(certified, "WORK", certified.WORK // 20)


@pytest.mark.usefixtures("short_proof")
def test_a_worker_answers_with_the_figures_of_a_checked_plan(tmp_path: Path) -> None:
    """A solve's row has budget, peak, time and bound, and says of which problem they are."""
    problem = transformer(3)
    file = tmp_path / "transformer.json"
    file.write_text(problem.to_json())
    found = worker.row_of(worker.Job("solve", "transformer", str(file), 70.0))
    assert found["peak_nbytes"] <= found["budget_nbytes"] < found["baseline_peak_nbytes"]
    assert found["bound_us"] <= found["time_us"]
    assert found["digest"] == worker.digest(file.read_text())
    assert found["tried"]
    assert found["left_out"] == []
    assert str(tmp_path) not in json.dumps(found)


@pytest.mark.usefixtures("short_proof")
def test_a_worker_leaves_a_stage_out(tmp_path: Path) -> None:
    """The stage is not tried, the plan is told by a digest; an unknown stage is refused."""
    file = tmp_path / "transformer.json"
    file.write_text(transformer(3).to_json())
    job = worker.Job("without", "transformer", str(file), 60.0, "integers")
    whole = worker.row_of(worker.Job("solve", "transformer", str(file), 60.0))
    found = worker.row_of(job)
    assert job.key == "without/transformer/60/integers"
    assert "integers" in whole["tried"]
    assert "integers" not in found["tried"]
    assert whole["plan"] == worker.row_of(replace(job, without=""))["plan"]
    with pytest.raises(ValueError, match="No stage is called 'integer'"):
        worker.row_of(replace(job, without="integer"))


def test_a_plans_digest_depends_on_order_and_kind() -> None:
    """Two plans have one digest if they have the same steps."""
    plans = [Plan.of(names) for names in (["a", "b"], ["b", "a"], ["a", "b", "a"], ["a", "b"])]
    digests = [worker.plan_digest(plan) for plan in plans]
    assert len(set(digests)) == 3
    assert digests[0] == digests[3]


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


def test_an_earlier_solver_stands_beside_this_one() -> None:
    """Twice the extra time before is half of it now; a budget that it refused counts for none."""
    now = [row("solve", "unet", 50.0, bound_us=1080.0), row("solve", "vit_12", 50.0)]
    earlier = row("before", "unet", 50.0, time_us=1200.0, gap=0.2)
    refused = row("before", "vit_12", 50.0, outcome="INFEASIBLE")
    text = page(*now, earlier, refused)
    assert lines_with(text, "| unet |", "20.00 % (20.00 %) → 10.00 % (10.00 %)")
    assert lines_with(text, "| vit_12 |", "- → 10.00 % (10.00 %)")
    assert lines_with(text, "- 50 %: -50.00 % (the bounds allow -60.00 %) over 1 graphs")
    assert "## Before" not in page(*now)


def test_a_plan_worse_than_the_earlier_solver_s_is_named() -> None:
    """By time or by gap; at the floor a lower peak is no worse, and a refusal always is."""
    now = [
        row("solve", "unet", 50.0),
        row("solve", "vit_12", 50.0),
        row("solve", "t5_6_6", 50.0, outcome="INFEASIBLE"),
        row("solve", "bert_12", None, peak_nbytes=180 * MIB),
        row("published", "fcn8_train", 90.0),
    ]
    earlier = [
        row("before", "unet", 50.0, time_us=1097.0),
        row("before", "vit_12", 50.0, time_us=1098.5),
        row("before", "t5_6_6", 50.0),
        row("before", "bert_12", None, time_us=1050.0),
        row("before", "fcn8_train", 90.0, gap=0.097),
    ]
    text = page(*now, *earlier)
    named = "before/unet/50; before/t5_6_6/50; before/fcn8_train/90"
    assert lines_with(text, "| extra time and gap at most 0.2 points", "| 5 | 2 |", named)


def test_effort_per_improvement_stands_over_n_log_n() -> None:
    """1,024 nodes: 20 million operations for 200 improvements are 100 thousand each, 9.8 times."""
    counted = {"operations": 20_000_000, "first": 3_000_000, "improvements": 200}
    none = {"operations": 20_000_000, "first": None, "improvements": 0}
    text = page(
        row("layered", "layered_1024_0", 80.0),
        row("growth", "layered_1024_0", 80.0, **counted),
        row("growth", "layered_1024_1", 80.0, **none),
    )
    (line,) = lines_with(text, "| 1,024 | 80 % | 2 |")
    assert line == "| 1,024 | 80 % | 2 | 3.0 | 0 to 200 | 100.0 | 9.8 |"
