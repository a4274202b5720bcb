"""What a process on this machine has found, a later one does not search for again."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import autoremat
from autoremat.ask.options import Setting
from autoremat.inductor import reading
from autoremat.planning import found_before, pipeline
from autoremat.planning.choice import Choice
from autoremat.planning.first_found import Found
from autoremat.planning.found_before import FoundBefore, answer
from tests.joint_graphs import CPU, leaf, subject_of
from tests.tiny import Chain, many_rows
from tests.training import step

# Dynamo looks at `.grad` of what a block is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

EAGER = Setting(compiler="eager")


def chain(x: Tensor) -> Tensor:
    """Operations whose results the backward needs."""
    for _ in range(3):
        x = torch.tanh(x.exp()).cumsum(0)
    return x.sum()


def chosen(setting: Setting, budget_nbytes: int = 1 << 30, rows: int = 64) -> Choice:
    """A plan for it."""
    return pipeline.choose(subject_of(chain, leaf(rows, 64), setting), budget_nbytes, setting)


def facts(choice: Choice) -> tuple[Any, ...]:
    """What a report says of a plan, and what runs."""
    solution = replace(choice.solution, seconds=0.0)
    written = (str(choice.forward.graph), str(choice.backward.graph))
    return (
        solution,
        choice.method,
        choice.peak_nbytes,
        choice.needed_nbytes,
        choice.fits,
        choice.code_us,
        *written,
    )


@contextlib.contextmanager
def nothing_is_searched() -> Iterator[None]:
    """Neither the solver nor generated code is asked."""
    with (
        mock.patch.object(pipeline, "search", side_effect=AssertionError),
        mock.patch.object(reading, "generate", side_effect=AssertionError),
    ):
        yield


def test_what_was_found_is_applied_without_a_search():
    """With its peaks, with what the step takes without it, and with what is proven."""
    own = chosen(EAGER)
    for budget_nbytes in (1 << 30, own.peak_nbytes - 4096):
        first = chosen(EAGER, budget_nbytes)
        baseline = first.baseline()
        with nothing_is_searched():
            again = chosen(EAGER, budget_nbytes)
            assert facts(again) == facts(first)
            assert again.baseline() == baseline


@pytest.mark.parametrize(
    "other",
    [
        {"budget_nbytes": (1 << 30) + 1},
        {"rows": 128},
        {"setting": replace(EAGER, time_limit_s=31.0)},
    ],
)
def test_another_question_is_searched_for(other: dict[str, Any]):
    """Another budget, other sizes, another limit."""
    chosen(EAGER)
    with nothing_is_searched(), pytest.raises(AssertionError):
        chosen(**{"setting": EAGER} | other)


@pytest.mark.parametrize("changed", ["code", "configuration", "threads"])
def test_where_something_else_is_found_nothing_counts(changed: str):
    """Another version of this package, of Inductor's options, another number of threads."""
    chosen(EAGER)
    new = {
        "code": mock.patch.object(found_before, "code_key", return_value="another"),
        "configuration": torch._inductor.config.patch("max_autotune", True),
        "threads": mock.patch.object(torch, "get_num_threads", return_value=7),
    }
    with new[changed], nothing_is_searched(), pytest.raises(AssertionError):
        chosen(EAGER)


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_without_caches_everything_is_searched_for():
    """As `torch.compiler.config.force_disable_caches` asks."""
    with torch.compiler.config.patch(force_disable_caches=True):
        chosen(EAGER)
        with nothing_is_searched(), pytest.raises(AssertionError):
            chosen(EAGER)


def test_a_plan_above_the_budget_that_more_time_might_better_is_the_answer_of_nobody_else():
    """A machine that was busy once does not decide for later processes, unless that is proven."""
    above = replace(Found.of(chosen(EAGER)), fits=False, left_out=["chains"], floor_nbytes=100)
    assert not above.is_last_word(100)
    assert above.is_last_word(99)
    assert replace(above, left_out=[]).is_last_word(100)
    assert replace(above, fits=True).is_last_word(100)

    def search() -> Found:
        searches.append(above)
        return above

    searches: list[Found] = []
    for is_kept in (False, True, True):
        answer("which?", Found, search, CPU, is_worth_keeping=lambda _, kept=is_kept: kept)
    assert len(searches) == 2


def kept_rows() -> sqlite3.Connection:
    """What is kept."""
    return sqlite3.connect(FoundBefore.default_path())


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "foreign"])
def test_what_is_damaged_or_foreign_is_searched_for(text: str):
    """No error, and no other plan."""
    first = chosen(EAGER)
    with contextlib.closing(kept_rows()) as rows, rows:
        if text == "foreign":
            rows.execute("UPDATE found SET value = replace(value, 'tanh', 'sinh')")
        else:
            rows.execute("UPDATE found SET value = ?", (text,))
    assert facts(chosen(EAGER)) == facts(first)


def test_a_file_that_is_none_is_begun_anew():
    """The next process finds what this one has found."""
    FoundBefore.default_path().write_bytes(b"no database" * 500)
    chosen(EAGER)
    with nothing_is_searched():
        chosen(EAGER)


@pytest.mark.filterwarnings("ignore::autoremat.OverBudgetWarning")
def test_a_model_of_blocks_is_planned_once():
    """Ways of each block are kept as well."""
    budget, reports = 200_000, []
    for _ in range(2):
        torch._dynamo.reset()
        model = Chain()
        autoremat.optimize(list(model.layers), budget, compiler="eager", verbose=False)
        for _ in range(3):
            step(model, (many_rows(),))
        reports.append(autoremat.report(model.layers[0]))
    assert reports[0].predicted_peak_nbytes == reports[1].predicted_peak_nbytes


_PROCESS = """
import torch, autoremat
from unittest import mock
from torch._dynamo.utils import counters
from torch._inductor.graph import GraphLowering
from autoremat.inductor import reading
from autoremat.planning import pipeline
from tests.tiny import Chain, many_rows
torch.set_num_threads(1)
torch.manual_seed(0)
model = autoremat.optimize(Chain(), 230_000, verbose=False)
searching = mock.patch.object(pipeline, "search", wraps=pipeline.search)
reading = mock.patch.object(reading, "generate", wraps=reading.generate)
generate = GraphLowering.codegen
generating = mock.patch.object(GraphLowering, "codegen", autospec=True, side_effect=generate)
with searching as search, reading as read, generating as generated:
    loss = model(many_rows())
    loss.backward()
    peak = autoremat.report(model).predicted_peak_nbytes
hits = counters["inductor"]["fxgraph_cache_hit"]
print(search.call_count, read.called, generated.called, hits, peak, loss.item())
"""


@pytest.mark.thorough
@pytest.mark.inductor
def test_a_second_process_plans_reads_and_generates_nothing(tmp_path: Path):
    """It finds its plan, the peaks, the report, and both modules in Inductor's own cache."""
    places = {"XDG_CACHE_HOME": tmp_path / "ours", "TORCHINDUCTOR_CACHE_DIR": tmp_path / "torchs"}
    environment = os.environ | {name: str(path) for name, path in places.items()}

    def run() -> list[str]:
        command = [sys.executable, "-W", "ignore", "-c", _PROCESS]
        root = Path(autoremat.__file__).parents[1]
        done = subprocess.run(
            command, env=environment, cwd=root, capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    first, second = run(), run()
    assert first[:3] == ["1", "True", "True"]
    assert second[:4] == ["0", "False", "False", "2"]
    assert first[4:] == second[4:]
