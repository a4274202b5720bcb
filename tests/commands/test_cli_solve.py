"""`autoremat solve`, as a user meets it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from autoremat_solver import Plan, Problem, Solver, check, read_problem, simulate, unrolled
from autoremat_solver.plan_document import plan_document
from typer.testing import Result

from tests.commands import command_line
from tests.solver.test_solver_networks import mlp
from tests.solver.test_solver_regions import AGAIN, stack

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "residual_mlp.json"
BRIEF = ("--time-limit", "3")


def run(*arguments: object) -> Result:
    return command_line.run("solve", *arguments)


def solved(*arguments: object, exit_code: int = 0) -> dict[str, Any]:
    """The one JSON object on stdout."""
    result = run(*arguments, "--json")
    assert result.exit_code == exit_code, result.stderr
    found = json.loads(result.stdout, parse_constant=_no_constant)
    assert isinstance(found, dict)
    return found


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON of every dialect")


def refused(*arguments: object) -> str:
    return command_line.refused("solve", *arguments)


@pytest.fixture
def captured(tmp_path: Path) -> Path:
    """A problem in our own schema."""
    path = tmp_path / "mlp.json"
    path.write_text(mlp(6).to_json(), encoding="utf-8")
    return path


def test_json_holds_a_plan_that_passes_the_check() -> None:
    """Figures and schedule agree with the problem, within the budget asked for."""
    found = solved(EXAMPLE, "--budget", "60%")
    problem = read_problem(EXAMPLE.read_text(encoding="utf-8"))
    assert found["schema"] == "autoremat.solver_plan/1"
    assert found["status"] in ("optimal", "feasible")
    assert found["budget"] == int(0.6 * found["baseline_peak"])
    assert found["floor"] <= found["peak"] <= found["budget"] < found["baseline_peak"]
    assert found["bound"] <= found["time"]
    assert found["time"] > found["baseline_time"] == sum(op.time_us for op in problem.ops)
    assert found["gap"] == pytest.approx(found["time"] / found["bound"] - 1)
    assert found["problem"] == EXAMPLE.name
    assert found["time_unit"] is None
    assert found["seconds"] > 0
    assert check(problem, Plan.of(found["schedule"]), found["peak"]) == []


def test_a_region_is_planned_run_by_run(tmp_path: Path) -> None:
    """A file that states a block once gives a plan of every run, within the budget."""
    path = tmp_path / "stack.json"
    path.write_text(stack().to_json(), encoding="utf-8")
    budget_nbytes = simulate(stack(), AGAIN).peak_nbytes
    found = solved(path, "--budget", str(budget_nbytes))
    assert {"f@1", "f@2", "f@3"} <= set(found["schedule"])
    assert check(unrolled(stack()), Plan.of(found["schedule"]), budget_nbytes) == []


@pytest.mark.parametrize("budget", ["100663296", "100_663_296", "96MiB", " 96 mib "])
def test_a_budget_is_bytes_or_has_a_unit(budget: str) -> None:
    """A bare number is bytes."""
    assert solved(EXAMPLE, "--budget", budget)["budget"] == 96 << 20


def test_a_percentage_is_of_the_peak_without_recompute() -> None:
    """100 % asks for no recompute at all."""
    found = solved(EXAMPLE, "--budget", "100%")
    assert found["budget"] == found["peak"] == found["baseline_peak"]
    assert found["time"] == found["baseline_time"]
    assert found["status"] == "optimal"


def test_the_table_shows_what_was_asked_found_and_proven() -> None:
    """Budget, peaks, times, gap, method and the status in words."""
    result = run(EXAMPLE, "--budget", "60%")
    assert result.exit_code == 0
    assert result.stderr == ""
    for text in ("Budget", "Peak", "floor", "Time", "bound", "gap", "Method", "Status", "188.7 MB"):
        assert text in result.stdout


def test_times_of_our_schema_are_microseconds(captured: Path) -> None:
    """A captured problem states its unit, in the table and in JSON."""
    assert solved(captured, "--budget", "100%")["time_unit"] == "us"
    assert re.search(r"\d (us|ms)\b", run(captured, "--budget", "100%").stdout)


@pytest.mark.thorough
def test_an_infeasible_budget_exits_with_2_and_says_what_would_do() -> None:
    """Smallest peak, floor, where it peaks, what is live there, and what to try."""
    result = run(EXAMPLE, "--budget", "10%")
    assert result.exit_code == 2
    assert result.stdout == ""
    smallest = int(re.search(r"--budget (\d+)", result.stderr)[1])  # type: ignore[index]
    assert "proven to be the smallest possible" in result.stderr
    assert "'grad_hidden7' 16.8 MB" in result.stderr
    assert "smaller batch" in result.stderr
    assert solved(EXAMPLE, "--budget", smallest)["peak"] <= smallest


def test_an_infeasible_budget_is_one_json_object_too(tmp_path: Path) -> None:
    """It names the same facts, and no plan is written."""
    out = tmp_path / "plan.json"
    found = solved(EXAMPLE, "--budget", "10%", "--out", out, exit_code=2)
    assert found["status"] == "infeasible"
    assert found["peak"] > found["budget"]
    assert found["peak_op"] in found["schedule"]
    assert found["peak_largest"][0] == {"value": "grad_hidden7", "nbytes": 16 << 20}
    assert str(found["peak"]) in found["message"]
    assert not out.exists()


def test_a_gap_without_bound_is_null() -> None:
    """A bound of 0 makes the gap infinite, which JSON cannot say."""
    unbounded = replace(Solver(mlp(2)).fastest(), bound_us=0.0)
    assert unbounded.gap == float("inf")
    document = plan_document(mlp(2), "x", 1, unbounded, "us")
    assert document["gap"] is None
    json.dumps(document, allow_nan=False)


def test_no_time_gives_the_best_simple_plan() -> None:
    """A time limit of 0 is marked as what it is."""
    found = solved(EXAMPLE, "--budget", "60%", "--time-limit", 0)
    assert found["status"] == "time_limit"
    assert found["peak"] <= found["budget"]


@pytest.mark.thorough
def test_out_writes_what_json_prints(tmp_path: Path) -> None:
    """The plan file carries schema, digest, figures and schedule."""
    out = tmp_path / "plan.json"
    printed = solved(EXAMPLE, "--budget", "60%", "--out", out)
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written == printed
    assert re.fullmatch(r"[0-9a-f]{64}", written["problem_digest"])


def test_the_digest_tells_problems_apart(captured: Path, tmp_path: Path) -> None:
    """The same problem has the same digest, a longer time another one."""
    other = tmp_path / "other.json"
    other.write_text(captured.read_text(encoding="utf-8").replace("20.0", "21.0", 1))
    digests = [
        solved(path, "--budget", "100%")["problem_digest"] for path in (captured, captured, other)
    ]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.thorough
def test_the_curve_as_json_and_as_a_table() -> None:
    """Points rise in peak and fall in time; each carries a plan that passes the check."""
    found = solved(EXAMPLE, "--pareto", *BRIEF)
    problem = read_problem(EXAMPLE.read_text(encoding="utf-8"))
    points = found["points"]
    assert len(points) >= 4
    assert points == sorted(points, key=lambda point: point["peak"])
    assert points == sorted(points, key=lambda point: -point["time"])
    for point in points:
        assert check(problem, Plan.of(point["schedule"]), point["peak"]) == []
    table = run(EXAMPLE, "--pareto", *BRIEF).stdout
    assert "without recompute: 188.7 MB, 195" in " ".join(table.split())
    assert f"{points[0]['time']:,.8g}" in table


def test_a_curve_that_time_has_cut_short_says_so() -> None:
    """How many budgets were solved, in both forms."""
    found = solved(EXAMPLE, "--pareto", "--time-limit", "0")
    assert (found["budgets_solved"], found["budgets_asked"]) == (2, 12)
    table = run(EXAMPLE, "--pareto", "--time-limit", "0").stdout
    assert "The time limit reached 2 of 12 budgets." in " ".join(table.split())


@pytest.mark.thorough
def test_the_curve_of_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns are left out; no figure is cut."""
    monkeypatch.setenv("COLUMNS", "40")
    table = run(EXAMPLE, "--pareto", *BRIEF).stdout
    assert max(map(len, table.splitlines())) <= 40
    assert "…" not in table
    assert "188.7 MB" in table
    assert "+0.00 %" in table


def test_input_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    """Missing, foreign, truncated, binary and empty files: exit code 1 and one message."""
    assert "cannot be read: No such file" in refused(tmp_path / "no.json", "--budget", "1GB")
    assert "cannot be read" in refused(tmp_path, "--budget", "1GB")
    path = tmp_path / "x.json"
    for content, message in (
        (EXAMPLE.read_bytes()[:500], "not JSON"),
        (b"[]", "is a list"),
        (b"\xff\xfe\x00", "not text in UTF-8"),
        (b"", "empty"),
        (Problem((), ()).to_json().encode(), "nothing to plan"),
        (EXAMPLE.read_bytes().replace(b'"nbytes"', b'"size"', 1), "Node 'x0' has no 'nbytes'"),
    ):
        path.write_bytes(content)
        assert message in refused(path, "--budget", "60%")
        assert str(path) in refused(path, "--budget", "60%")


@pytest.mark.parametrize("budget", ["12XB", "0", "-5", "101%", "nan", "", "9" * 5000])
def test_a_malformed_budget_is_refused_with_the_accepted_forms(budget: str) -> None:
    """The share is named as what it is here."""
    assert "share of the peak without recompute" in refused(EXAMPLE, "--budget", budget)


def test_a_wrong_use_does_not_look_like_an_infeasible_budget() -> None:
    """Unknown options, missing ones and contradictions exit with 1; 2 means infeasible."""
    assert "No such option" in refused(EXAMPLE, "--bogus")
    assert "either --budget" in refused(EXAMPLE)
    assert "either --budget" in refused(EXAMPLE, "--budget", "60%", "--pareto")
    assert "--time-limit" in refused(EXAMPLE, "--budget", "60%", "--time-limit", -1)
    assert "finite" in refused(EXAMPLE, "--budget", "60%", "--time-limit", "inf")


def test_the_problem_is_never_overwritten(captured: Path, tmp_path: Path) -> None:
    """Neither by its own name nor through a link."""
    before = captured.read_bytes()
    link = tmp_path / "link.json"
    link.symlink_to(captured)
    for out in (captured, link):
        assert "the problem's own file" in refused(captured, "--budget", "100%", "--out", out)
    assert captured.read_bytes() == before


def test_a_plan_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before solving where that can be known, else afterwards."""
    ask = (EXAMPLE, "--budget", "100%", "--out")
    assert "is a directory" in refused(*ask, tmp_path)
    assert "no directory" in refused(*ask, tmp_path / "no" / "plan.json")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert "No space left on device" in refused(*ask, tmp_path / "plan.json")


def test_help_has_examples() -> None:
    """Both ways to ask for help exit with 0."""
    result = run("--help")
    assert result.exit_code == 0
    assert "autoremat solve graph.json --budget 60%" in result.stdout


def process(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A Python of its own, without torch, that runs the code and then the command line."""
    start = "import sys; sys.modules['torch'] = None\n"
    end = "\nfrom autoremat.__main__ import main; main()"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "solver")])
    return subprocess.run(
        [sys.executable, "-c", start + code + end, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )


def test_the_command_line_needs_no_torch() -> None:
    """A whole solve runs where torch cannot be imported."""
    done = process("", "solve", EXAMPLE, "--budget", "60%", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peak"] > 0


def test_ctrl_c_ends_with_130_and_one_sentence() -> None:
    """While the solver runs there is nothing to save: no traceback."""
    code = (
        "import os, signal\n"
        "from autoremat_solver import Solver\n"
        "Solver.solve = lambda *_: os.kill(os.getpid(), signal.SIGINT)"
    )
    done = process(code, "solve", EXAMPLE, "--budget", "60%")
    assert done.returncode == 130
    assert done.stdout == ""
    assert done.stderr.strip() == "Interrupted: nothing was written."


def test_ctrl_c_elsewhere_ends_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also outside the solver."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autoremat.commands.solve.read_problem", interrupted)
    result = run(EXAMPLE, "--budget", "60%")
    assert result.exit_code == 130
    assert result.stderr == "Interrupted: nothing was written.\n"


def test_the_console_script_is_declared() -> None:
    """`autoremat` on the path is the same as `python -m autoremat`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"autoremat": "autoremat.__main__:main"}


def readme_section() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text.split("## The solver alone")[1].split("\n## ")[0]


@pytest.mark.thorough
def test_the_commands_in_the_readme_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them exits with 0, and the Python beside them runs."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^\.venv/bin/autoremat (.*)$", readme_section(), re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        result = command_line.run(*shlex.split(command, comments=True), *BRIEF)
        assert result.exit_code == 0, (command, result.stderr)
    (code,) = re.findall(r"```python\n(.*?)```", readme_section(), re.DOTALL)
    exec(code, {})
