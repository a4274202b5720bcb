"""The compatibility page: a function of its rows that hides neither failures nor mismatches."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import compatibility_page
import compatibility_zoo

DOCS = Path(__file__).parents[2] / "docs"
Row = dict[str, Any]
KINDS = compatibility_zoo.KINDS
RUN = {
    "date": "2026-01-01",
    "command": "python docs/compatibility.py",
    "time_limit": 5.0,
    "timeout": 300.0,
    "system": "Linux x86_64",
    "versions": {"python": "3.12.0", "torch": "2.11.0"},
}


def row(name: str = "gpt2", **changes: Any) -> Row:
    """A decoder in one graph, planned within its budget, with the bits of the unplanned step."""
    figures: Row = {
        "name": name,
        "compiler": "eager",
        "kind": "decoder",
        "status": "ok",
        "resident_nbytes": 100_000,
        "eager_peak_nbytes": 600_000,
        "graphs": 1,
        "planned_graphs": 1,
        "breaks": {},
        "fallbacks": [],
        "warnings": [],
        "recomputed": 7,
        "budget_nbytes": 400_000,
        "predicted_nbytes": 390_000,
        "measured_nbytes": 390_000,
        "loss_error": 0.0,
        "gradient_error": 0.0,
        "buffer_error": 0.0,
        "worst_gradient": "",
        "tolerance": 1e-4,
        "bitwise": True,
        "seconds": 9.0,
        "run": 0,
    }
    return {**figures, **changes}


def page(*rows: Row) -> str:
    return compatibility_page.page([RUN], rows, KINDS)


def count(text: str, name: str) -> list[str]:
    """The figures in the summary's row of that name."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_a_planned_architecture_is_one_line_of_its_kind() -> None:
    """Peaks are in kB, a budget that was lowered to the smallest peak carries a star."""
    text = page(row(), row("llama", asked_nbytes=300_000))
    assert "## Decoders" in text
    assert "| gpt2 | eager | 1 / 1 | 0 | 7 recomputed | 0.0e+00 | 0.0e+00 | yes |" in text
    assert "| 390.0 | 390.0 | 400.0 | 600.0 | 9 |" in text
    assert "| 390.0 | 390.0 | 400.0* | 600.0 | 9 |" in text
    assert count(text, "planned completely") == ["2"]
    assert count(text, "a plan within 60 % was found") == ["1"]
    assert "## Failures" not in text


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_error": 1e-2},
        {"gradient_error": 1e-2},
        {"gradient_error": float("nan")},
        {"buffer_error": float("inf")},
        {"bitwise": False},
    ],
)
def test_every_sort_of_mismatch_is_counted_and_named(changes: Row) -> None:
    """Loss, gradients, buffers and bits: a difference in any of them is a silent mismatch."""
    text = page(row(), row("llama", **changes))
    assert count(text, "**silent mismatches**") == ["1"]
    assert "- llama (eager): loss" in text
    assert "- gpt2 (eager): loss" not in text
    assert "**mismatch**" in text


def test_rounding_is_no_mismatch() -> None:
    """Inductor's fusion rounds differently, and has no bitwise reference."""
    inductor = row(gradient_error=1e-6, compiler="inductor")
    del inductor["bitwise"]
    assert count(page(inductor), "**silent mismatches**") == ["0"]


def test_failures_and_fallbacks_are_not_planned() -> None:
    """A crash has its message, a fallback its code and sentence, and neither counts as planned."""
    text = page(
        {
            "name": "mpt",
            "compiler": "eager",
            "kind": "decoder",
            "run": 0,
            "status": "crash",
            "message": "exit code -11",
        },
        row("mamba", planned_graphs=0, fallbacks=["AR101: Planning failed: KeyError: 'a'."]),
        row("opt", graphs=3, fallbacks=["AR103: Shared."], breaks={"Data-dependent": 2}),
    )
    assert "- mpt (eager): crash, exit code -11" in text
    assert "- mamba (eager): AR101: Planning failed: KeyError: 'a'." in text
    assert "- Data-dependent: opt (eager) (2)" in text
    assert "| opt | eager | 1 / 3 | 2 | 7 recomputed, AR103 |" in text
    figures = [count(text, name)[0] for name in ("planned completely", "planned in part")]
    assert figures == ["0", "1"]
    assert count(text, "not planned") == ["1"]
    assert count(text, "crashed or timed out") == ["1"]


def test_a_peak_above_the_budget_is_shown_and_said_to_be_warned_of_or_not() -> None:
    """A promise broken without a warning is worse than one with it."""
    text = page(
        row(measured_nbytes=410_000),
        row(
            "opt",
            measured_nbytes=410_000,
            predicted_nbytes=420_000,
            graphs=3,
            breaks={"Lock": 2},
            warnings=["OverBudgetWarning: Measured peak"],
        ),
    )
    assert "budget 400.0 kB, in 1 graphs with 0 breaks; unseen, without a warning" in text
    assert "budget 400.0 kB, in 3 graphs with 2 breaks; planned above, warned of" in text
    assert count(text, "measured peak above the budget") == ["2"]
    assert count(text, "measured peak above the prediction") == ["1"]
    assert count(text, "a plan within 60 % was found") == ["1"]


def test_architectures_without_a_row_are_named_and_not_counted() -> None:
    """A compiler that ran on fewer says on which it did not."""
    rows = [row(), row(compiler="inductor"), row("opt")]
    text = compatibility_page.page([RUN], rows, KINDS, ["gpt2", "opt", "rwkv"])
    assert "- under inductor: opt\n- under eager and inductor: rwkv\n" in text
    assert count(text, "architectures") == ["2", "1"]
    assert "## Not measured yet" not in page(*rows)


def test_what_fails_without_us_as_well_is_said_and_counts_all_the_same() -> None:
    """An excuse is shown beside a failure, never in its place, and not where nothing failed."""
    upstream = {"opt": "It differs by itself.", "gpt2": "So it did."}
    text = compatibility_page.page([RUN], [row(), row("opt", bitwise=False)], KINDS, (), upstream)
    assert "- opt: It differs by itself." in text
    assert "So it did." not in text
    assert count(text, "**silent mismatches**") == ["1"]


def test_compilers_are_counted_apart() -> None:
    """The summary has a column for each compiler."""
    text = page(row(), row(compiler="inductor"), row("opt"))
    assert count(text, "architectures") == ["2", "1"]


def test_the_zoo_covers_every_kind_and_at_least_130_architectures() -> None:
    """No kind is empty, no architecture of an unknown kind would be missing from the page."""
    assert len(compatibility_zoo.ZOO) >= 130
    assert {entry.kind for entry in compatibility_zoo.ZOO.values()} == set(KINDS)
    sources = [DOCS / f"compatibility_{name}.py" for name in ("text", "senses")]
    trees = [ast.parse(source.read_text(encoding="utf-8")) for source in sources]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Yield)]
    assert len(calls) == len(compatibility_zoo.ZOO), "two architectures share a name"


@pytest.mark.parametrize("name", ["gpt2", "t5", "vit", "olmoe", "sam", "qwen2_vl", "patchtst"])
def test_an_architecture_gives_the_same_step_each_time(name: str) -> None:
    """Model and batch are seeded: two builds give one loss, which has a gradient."""
    losses = []
    for _ in range(2):
        model, batch = compatibility_zoo.ZOO[name].build()
        assert model.training
        torch.manual_seed(0)
        losses.append(compatibility_zoo.ZOO[name].loss(model(**batch)))
    assert losses[0].requires_grad
    assert torch.equal(losses[0], losses[1])
