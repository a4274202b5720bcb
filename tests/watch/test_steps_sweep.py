"""No form of a training step is above its budget in silence, and the sweep would see it.

A dozen of the cases of `docs/steps_sweep.py`, with the smallest of its models.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import autoremat

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import steps_page
from steps_forms import FORMS, Size, batch_of
from steps_models import Design
from steps_verdicts import Course, Told
from steps_worker import TOLERANCE, Case, row_of

# Forms, and cases whose budget is about half of the eager step's peak.
TRIED = {
    "plain": 10,
    "grown batch": 11,
    "shuffled length": 12,
    "n runs": 10,
    "each block": 14,
    "two calls": 10,
    "two towers": 10,
    "micro-batches": 1,
    "pipeline": 15,
    "graph breaks": 25,
    "loss outside": 2,
    "late optimizer": 8,
    "kept output": 13,
}
BUDGET = 1_000_000
LARGE, SMALL = "8 x 128", "1 x 128"


def tried(form: str) -> dict[str, Any]:
    return row_of(Case(TRIED[form], 0, form, time_limit_s=0.5, most_layers=3, most_steps=3))


@pytest.mark.thorough
@pytest.mark.parametrize("form", TRIED)
def test_no_step_is_above_its_budget_in_silence(form: str):
    """Whatever the form of the step: the budget is kept, or the number is told."""
    row = tried(form)
    assert row["verdict"] in ("kept", "told"), row
    assert row["gradient_error"] <= TOLERANCE


def test_every_form_takes_its_step_without_a_plan():
    """Gradients reach all parameters that the step reads."""
    for form in FORMS.values():
        training = form.plain([Design("0", form.arrangement, 3) for _ in form.kinds])
        form.take(training, batch_of(Size(2, 16)))
        assert any(p.grad is not None for p in training.whole.parameters()), form.name


# --- the verdict: what nobody told is found ----------------------------------------------------


def course(*told: Told) -> Course:
    return Course(BUDGET, list(told))


def test_a_step_above_the_budget_of_which_nothing_was_said_is_silent():
    """One byte is enough."""
    assert course().verdict(LARGE, BUDGET + 1) == "silent"
    assert course().verdict(LARGE, BUDGET) == "kept"


def test_what_was_told_of_a_smaller_batch_does_not_count_for_a_larger_one():
    """Unless it names at least what is measured there."""
    assert course(Told(SMALL, BUDGET + 1, "")).verdict(LARGE, BUDGET + 2) == "silent"
    assert course(Told(SMALL, BUDGET + 2, "")).verdict(LARGE, BUDGET + 2) == "told"


def test_a_warning_that_promises_the_next_step_does_not_count_for_it():
    """It has said that the budget is going to be kept."""
    warning = autoremat.OverBudgetWarning(None, BUDGET, 2 * BUDGET)
    warning.is_planned_anew = True
    assert course(Told.of(warning, LARGE, BUDGET)).verdict(LARGE, BUDGET + 1) == "silent"


def test_a_warning_without_a_number_is_counted_by_itself():
    """It says that nothing is promised, but not how much is needed."""
    fallback = Told.of(autoremat.FallbackWarning("AR105", "Runs in eager mode."), LARGE, BUDGET)
    assert course(fallback).verdict(LARGE, BUDGET + 1) == "told without a number"


def test_numbers_are_read_from_attributes_and_from_text():
    """The budget itself is not what the step needs."""
    over = autoremat.OverBudgetWarning(None, BUDGET, 1_200_000)
    assert Told.of(over, LARGE, BUDGET).nbytes == 1_200_000
    text = autoremat.FallbackWarning("AR101", "Above the budget 1.0 MB: 1.5 MB are live.")
    assert Told.of(text, LARGE, BUDGET).nbytes == 1_500_000
    only_budget = autoremat.FallbackWarning("AR101", "Above the budget 1.0 MB.")
    assert Told.of(only_budget, LARGE, BUDGET).nbytes is None


def test_the_worst_step_decides():
    """A case in which one step was silent is silent."""
    found = course(Told(SMALL, BUDGET + 1, ""))
    found.ran(SMALL, BUDGET + 1)
    found.ran(LARGE, BUDGET + 5)
    found.ran(SMALL, BUDGET)
    assert [verdict for _, _, verdict in found.steps] == ["told", "silent", "kept"]
    assert found.judgement()["verdict"] == "silent"


@pytest.mark.thorough
def test_gradients_that_differ_are_seen(monkeypatch: pytest.MonkeyPatch):
    """The planned step is compared with the eager one, not with itself."""
    planned = type(FORMS["plain"]).planned

    def scaled(*args: Any) -> Any:
        training = planned(*args)
        training.model.head.weight.register_hook(lambda gradient: gradient * 1.1)
        return training

    monkeypatch.setattr(type(FORMS["plain"]), "planned", scaled)
    assert tried("plain")["gradient_error"] > TOLERANCE


# --- the page ----------------------------------------------------------------------------------


def row(**changes: Any) -> dict[str, Any]:
    """A case that keeps its budget."""
    found = course()
    found.ran(LARGE, BUDGET)
    figures = {"status": "ok", "form": "plain", "number": 3, "seed": 0, "compiler": "eager"}
    figures |= {"through": "optimize", "asked_nbytes": BUDGET, "gradient_error": 0.0}
    return {**figures, "tolerance": TOLERANCE, **found.judgement(), **changes}


def page(*rows: dict[str, Any]) -> str:
    return steps_page.page([], rows, {"plain": "One call."})


def test_the_page_names_what_was_silent():
    """With the case to run again, the budget and what was measured."""
    silent = row(verdict="silent", worst_nbytes=BUDGET + 7)
    assert "| plain | 0/3, eager | optimize |" in page(silent)
    assert "| 1,000,007 |" in page(silent)
    assert "1,000,007" not in page(row())


def test_the_page_hides_no_failure():
    """A crash, a case that took too long, and gradients that differ or are not numbers."""
    assert "crash, boom" in page(row(status="crash", message="boom"))
    for error in (2 * TOLERANCE, float("nan")):
        assert "gradients are off" in page(row(gradient_error=error))
    assert "gradients are off" not in page(row())
