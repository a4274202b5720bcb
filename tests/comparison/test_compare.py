"""`autoremat.compare` and its command, as a user meets them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

import autoremat
from autoremat.comparison import race as race_module
from autoremat.comparison import worker as worker_module
from autoremat.comparison.model import Comparison
from autoremat.comparison.race import ComparisonError, Options
from autoremat.comparison.serve import seconds
from autoremat.comparison.variants import Task, budget_nbytes, chosen_variants
from autoremat.comparison.worker import measure
from tests.commands import command_line
from tests.commands.test_cli_solve import process
from tests.comparison import comparison_target

TARGET = f"{comparison_target.__file__}:make"


@pytest.fixture(scope="module")
def found() -> Comparison:
    """A run of three processes: eager, a checkpoint for two layers, the smallest budget."""
    return autoremat.compare(
        comparison_target.make,
        budgets=["smallest"],
        variants=["every-2"],
        compiler="eager",
        rounds=2,
        time_limit=5.0,
        verbose=False,
    )


@pytest.mark.thorough
def test_every_variant_is_a_row(found: Comparison) -> None:
    """Eager first, then in the order asked for."""
    assert [row.name for row in found.rows] == ["eager", "every-2", "autoremat smallest"]
    assert [row.status for row in found.rows] == ["ok"] * 3
    assert found.model == "Blocks"
    assert found.batch == 256
    assert found.is_complete
    assert found.yardstick == "eager"


@pytest.mark.thorough
def test_peaks_are_those_of_the_step(found: Comparison) -> None:
    """Eager's is the one that `measure_peak` sees here; the others are below it, as predicted."""
    eager, pairs, smallest = (row.peak_nbytes or 0 for row in found.rows)
    assert eager == comparison_target.peak_nbytes()
    assert smallest < pairs < eager
    ours = found.row("autoremat smallest")
    assert ours.peak_nbytes == ours.predicted_peak_nbytes == ours.budget_nbytes


def test_times_are_medians_of_the_rounds(found: Comparison) -> None:
    """With the ratio to eager's step, and what that means for the batch."""
    for row in found.rows:
        assert row.rounds == 2
        assert row.step_seconds is not None
        assert row.samples_per_second == pytest.approx(256 / row.step_seconds)
        assert row.time_ratio_range is not None
        assert row.time_ratio_range[0] <= (row.time_ratio or 0) <= row.time_ratio_range[1]
        assert (row.first_step_seconds or 0) > 0
    assert found.row("eager").time_ratio == 1.0


def test_json_is_the_whole_comparison(found: Comparison) -> None:
    """With its schema, and strict."""
    document = json.loads(found.to_json())
    assert document["schema"] == "autoremat.comparison/1"
    assert len(document["rows"]) == len(found.rows)
    assert document["rows"][0]["peak_nbytes"] == found.rows[0].peak_nbytes


@pytest.mark.slow
@pytest.mark.inductor
def test_torch_compile_and_its_budget_are_measured() -> None:
    """With Inductor, checkpointed layers and ours too."""
    names = ["every-layer", "every-2", "selective-attention", "compile", "torch:0.1"]
    found = autoremat.compare(TARGET, budgets=["50%"], variants=names, rounds=1, verbose=False)
    assert [row.status for row in found.rows] == ["ok"] * 7, found.table()
    assert {row.compiler for row in found.rows[1:]} == {"inductor"}
    every, compiled = (found.row(name).peak_nbytes or 0 for name in ("every-layer", "compile"))
    assert every < compiled


# --- one variant, in this process ----------------------------------------------------------------


def measured(function: str, *names: str, budget: int | None = None) -> dict[str, Any]:
    """The figures of a variant of `comparison_target`."""
    variant = chosen_variants(names, [] if budget is None else [budget], "eager")[-1]
    target = f"{comparison_target.__file__}:{function}"
    figures, timed = measure(Task(target, variant, budget, 5.0, None))
    assert (timed is not None) == (figures["status"] == "ok")
    return figures


def test_a_budget_is_kept_and_one_out_of_reach_says_which_is_not() -> None:
    """The smallest peak in words and as a number; as a budget it is accepted."""
    refused = measured("make_small", budget=1000)
    smallest = refused["smallest_peak_nbytes"]
    assert refused["status"] == "infeasible"
    assert (
        f"no plan fits 1.0 kB; the smallest peak is {smallest / 1000:.1f} kB" in refused["message"]
    )
    torch.compiler.reset()
    kept = measured("make_small", budget=smallest)
    assert kept["status"] == "ok"
    assert kept["peak_nbytes"] <= kept["budget_nbytes"] == smallest


@pytest.mark.thorough
def test_torchs_own_budget_is_set_while_the_step_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its setting, in the first step."""
    seen = []

    def recording(step: Callable[[], object]) -> float:
        seen.append(torch._functorch.config.activation_memory_budget)
        return seconds(step)

    monkeypatch.setattr(torch.nn.Module, "compile", lambda _: None)
    monkeypatch.setattr(worker_module, "seconds", recording)
    assert measured("make_small", "torch:0.25")["status"] == "ok"
    assert seen == [0.25]


def test_a_model_without_layers_has_none_to_checkpoint() -> None:
    """The row says so."""
    figures = measured("make_without_layers", "every-layer")
    assert figures == {"status": "not applicable", "message": "no repeated layers found"}


def test_running_out_of_memory_is_a_status_of_its_own() -> None:
    """On any device, by torch's own errors."""
    assert measured("make_too_large")["status"] == "out of memory"
    assert "1.00 GiB" in measured("make_refused_by_a_device")["message"]
    assert measured("make_refused_by_a_device")["status"] == "out of memory"


def test_an_error_of_the_step_is_told_in_one_line() -> None:
    """As a traceback ends."""
    figures = measured("make_failing")
    assert figures == {"status": "failed", "message": "KeyError: 'no such weight'"}


def test_a_target_that_makes_no_model_is_no_row() -> None:
    """What it returned is said by the loader."""
    figures = measured("make_nothing")
    assert figures["status"] == "bad target"
    assert "make_nothing returned None" in figures["message"]


@pytest.mark.thorough
def test_what_is_not_planned_is_said() -> None:
    """A forward that Dynamo skips keeps no budget."""
    with pytest.warns(autoremat.FallbackWarning):
        figures = measured("make_uncompiled", budget=1 << 40)
    assert figures["status"] == "ok"
    assert "nothing was planned, so no budget is kept; AR105" in figures["message"]


# --- names and budgets ---------------------------------------------------------------------------


def test_the_default_is_all_that_the_compiler_can_run() -> None:
    """torch.compile and its budget need Inductor; where they are named they run all the same."""
    names = [v.name for v in chosen_variants(None, ["50%"], "eager")]
    checkpoints = ["every-layer", "every-2", "sqrt", "selective-attention"]
    assert names == ["eager", *checkpoints, "autoremat 50%"]
    compiled = [v.name for v in chosen_variants(None, [], "inductor")]
    assert compiled == ["eager", *checkpoints, "compile", "torch:0.5", "torch:0.1"]
    assert chosen_variants(["compile"], [], "eager")[1].compiler == "inductor"


def test_a_name_counts_once() -> None:
    """However often it is asked for."""
    assert len(chosen_variants(["sqrt", "eager", "sqrt"], ["50%", " 50% "], "eager")) == 3


@pytest.mark.parametrize("name", ["every-0", "every-", "torch:1.5", "torch:x", "fastest", ""])
def test_an_unknown_variant_is_refused(name: str) -> None:
    """With those that are known."""
    with pytest.raises(ValueError, match=r"not known\. Accepted: every-layer, every-N"):
        chosen_variants([name], [], "eager")


@pytest.mark.parametrize("budget", ["12XB", "0%", "101%", "least", 0])
def test_a_malformed_budget_is_refused(budget: str | int) -> None:
    """Before anything is measured."""
    with pytest.raises(ValueError, match="Accepted: a size"):
        chosen_variants([], [budget], "eager")


def test_a_share_is_of_what_eager_needs_above_resident() -> None:
    """A size is of the whole step; without eager's peak there is no share."""
    _, half, size, smallest = chosen_variants([], ["50%", " 2kB", "smallest"], "eager")
    assert budget_nbytes(half.budget, 1000, 400) == 1200
    assert budget_nbytes(size.budget, 1000, 400) == 2000
    assert budget_nbytes(smallest.budget, 1000, None) is None
    with pytest.raises(ValueError, match="give a size"):
        budget_nbytes(half.budget, 1000, None)


def test_options_are_checked() -> None:
    """A count of rounds, and times that end."""
    with pytest.raises(ValueError, match="rounds is 0"):
        Options(rounds=0)
    with pytest.raises(ValueError, match="time_limit is inf"):
        Options(time_limit=float("inf"))
    with pytest.raises(ValueError, match="timeout is 0"):
        Options(timeout=0)
    with pytest.raises(ValueError, match="compiler is"):
        autoremat.compare(TARGET, compiler="gcc")


def test_make_is_a_function_that_another_process_can_find() -> None:
    """No lambda, no function in a function, no callable object."""

    def local() -> None: ...

    for make in (lambda: None, local, Comparison.table):
        with pytest.raises(ValueError, match="other processes cannot find by name"):
            autoremat.compare(make)  # type: ignore[arg-type]


# --- the command, with processes that answer at once ---------------------------------------------


class Canned:
    """In place of `Worker`: answers by the variant's name; remembers whether it was ended."""

    answers: dict[str, Any]
    started: list[Canned]

    def __init__(self, command: list[str], *_: object) -> None:
        self.task = json.loads(command[-1])
        self.name = self.task["variant"]["name"]
        self.is_closed = False
        self.steps = 0
        self.ending = ""
        Canned.started.append(self)

    def receive(self, _: float) -> dict[str, Any]:
        answer = Canned.answers.get(self.name, OK)
        if isinstance(answer, BaseException):
            raise answer
        return dict(answer)

    def time_step(self, _: float) -> float | None:
        self.steps += 1
        if Canned.answers.get("leaves") == self.name:
            self.ending = "exit code 1"
            return None
        if Canned.answers.get("interrupted after") == self.steps:
            raise KeyboardInterrupt
        return 0.5

    def close(self) -> None:
        self.is_closed = True


OK = {
    "status": "ok",
    "model": "GPT",
    "parameters": 12,
    "batch": 4,
    "device": "cpu",
    "torch_version": "2.13",
    "resident_nbytes": 1000,
    "peak_nbytes": 3000,
    "first_step_seconds": 1.0,
}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the workers say, by the variant's name; a sound row if not set."""
    monkeypatch.setattr(race_module, "Worker", Canned)
    Canned.answers, Canned.started = {}, []
    return Canned.answers


def run(*options: str) -> Result:
    return command_line.run("compare", "model.py:make", *options)


def refused(*options: str) -> str:
    return command_line.refused("compare", "model.py:make", *options)


def test_the_command_prints_a_table(answers: dict[str, Any]) -> None:
    """Failed variants are lines beneath it, and the exit code is 0."""
    answers["sqrt"] = {"status": "crash", "message": "exit code 1: [bold]boom[/]"}
    result = run("--variants", "sqrt,compile", "--budgets", "50%,2000")
    assert result.exit_code == 0, result.exception
    assert re.search(
        r"^ *compile +3\.0 kB +100 % +500\.0 ms +1\.00 +8\.0 +1\.0 s", result.stdout, re.M
    )
    assert "sqrt: crash: exit code 1: [bold]boom[/]" in result.stdout
    assert [w.task["budget_nbytes"] for w in Canned.started] == [None, None, None, 2000, 2000]
    assert all(worker.is_closed for worker in Canned.started)
    assert "measure sqrt" in result.stderr


def test_the_command_prints_one_object(answers: dict[str, Any]) -> None:
    """Progress does not mix with it."""
    answers["eager"] = {"status": "out of memory", "message": "OutOfMemoryError"}
    document = json.loads(run("--variants", "sqrt", "--budgets", "50%,smallest", "--json").stdout)
    rows = {row["name"]: row for row in document["rows"]}
    assert rows["autoremat 50%"]["status"] == "not applicable"
    assert "give a size" in rows["autoremat 50%"]["message"]
    assert rows["autoremat smallest"]["status"] == "ok"
    assert document["yardstick"] == "sqrt"
    assert rows["sqrt"]["time_ratio"] == 1.0


def test_a_process_that_ends_while_it_is_timed_is_told(answers: dict[str, Any]) -> None:
    """Its peak stands, without a time."""
    answers["leaves"] = "sqrt"
    document = json.loads(run("--variants", "sqrt", "--budgets", "smallest", "--json").stdout)
    row = document["rows"][1]
    assert row["message"] == "its process ended while steps were timed: exit code 1"
    assert row["peak_nbytes"] == 3000
    assert row["step_seconds"] is None
    assert [r["rounds"] for r in document["rows"]] == [7, 0, 7]


def test_the_command_itself_needs_no_torch() -> None:
    """Only the processes that measure import it, so the first line of progress comes at once."""
    done = process("import autoremat.commands.compare", "compare", "--help")
    assert done.returncode == 0, done.stderr
    assert "Exit codes" in done.stdout


def test_alone_each_variant_is_timed_before_the_next_is_built(answers: dict[str, Any]) -> None:
    """So that the device holds one at a time."""
    result = run(
        "--variants", "sqrt", "--budgets", "smallest", "--alone", "--rounds", "2", "--json"
    )
    assert [worker.steps for worker in Canned.started] == [3, 3, 3]
    assert [row["rounds"] for row in json.loads(result.stdout)["rows"]] == [2, 2, 2]
    assert all(worker.is_closed for worker in Canned.started)


@pytest.mark.parametrize("moment", ["while one is measured", "while all are timed"])
def test_ctrl_c_prints_what_was_measured(answers: dict[str, Any], moment: str) -> None:
    """With 130, and no process left."""
    if moment == "while one is measured":
        answers["sqrt"] = KeyboardInterrupt()
    else:
        answers["interrupted after"] = 3
    result = run("--variants", "sqrt", "--budgets", "smallest", "--json")
    assert result.exit_code == 130
    assert "autoremat: Interrupted: what follows was measured before." in result.stderr
    document = json.loads(result.stdout)
    assert document["is_complete"] is False
    assert document["rows"][0]["peak_nbytes"] == 3000
    assert len(document["rows"]) == (1 if moment == "while one is measured" else 3)
    assert all(worker.is_closed for worker in Canned.started)


def test_a_target_that_cannot_be_used_ends_the_run(answers: dict[str, Any]) -> None:
    """After its first process; in Python it is a ValueError."""
    answers["eager"] = {"status": "bad target", "message": "The file model.py does not exist."}
    assert (
        refused() == "autoremat: measure eager autoremat: measure eager 0/12 variants autoremat: "
        "stopped in measure eager after 0.0 s (ComparisonError) autoremat: The file model.py does "
        "not exist."
    )
    answers["eager"] = {"status": "failed", "message": "KeyError: 'x'"}
    assert "model.py:make fails in eager mode: KeyError: 'x'. Check that" in refused()
    with pytest.raises(ComparisonError, match="fails in eager mode"):
        autoremat.compare("model.py:make", verbose=False)


def test_malformed_options_start_nothing(answers: dict[str, Any]) -> None:
    """Budgets, variants, numbers, the plot's path."""
    assert "no number with a unit" in refused("--budgets", "least")
    assert "Variant 'fastest' is not known" in refused("--variants", "fastest")
    assert "--rounds" in refused("--rounds", "0")
    assert "timeout is -1.0" in refused("--timeout", "-1")
    assert "finite" in refused("--time-limit", "inf")
    assert "--compiler" in refused("--compiler", "gcc")
    assert Canned.started == []


def test_the_plot_is_written(answers: dict[str, Any], tmp_path: Path) -> None:
    """Over an older one of ours, never over another file unless that is asked for."""
    out = tmp_path / "plot.svg"
    for _ in range(2):
        result = run("--variants", "sqrt", "--budgets", "smallest", "--plot", str(out))
        assert result.exit_code == 0
        assert f"Plot written to {out}" in "".join(result.stdout.splitlines())
    out.write_text("notes", encoding="utf-8")
    assert "autoremat did not write it" in refused("--plot", str(out))
    assert out.read_text(encoding="utf-8") == "notes"
    assert run("--plot", str(out), "--force").exit_code == 0
    assert out.read_text(encoding="utf-8").startswith("<svg")
    assert [path.name for path in tmp_path.iterdir()] == ["plot.svg"]


def test_there_is_no_plot_of_nothing(answers: dict[str, Any], tmp_path: Path) -> None:
    """An older one stays."""
    answers["eager"] = answers["sqrt"] = {"status": "timeout", "message": "no answer within 900 s"}
    out = tmp_path / "plot.svg"
    result = run("--variants", "sqrt", "--budgets", "50%", "--plot", str(out))
    assert result.exit_code == 0
    assert "No step was timed, so there is no plot." in result.stderr
    assert not out.exists()


def test_a_plot_that_cannot_be_written_is_found_before_the_run(
    answers: dict[str, Any], tmp_path: Path
) -> None:
    """A directory, or one that is missing."""
    assert "is a directory" in refused("--plot", str(tmp_path))
    assert "there is no directory" in refused("--plot", str(tmp_path / "no" / "plot.svg"))
    assert Canned.started == []
