"""What the user reads and a program can read when something goes wrong."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch

from autoremat._torch import passing_through
from autoremat.errors import (
    FallbackError,
    FallbackWarning,
    InfeasibleBudget,
    LiveValue,
    OverBudget,
    OverBudgetWarning,
    PlanMismatch,
    RankError,
    on_ranks,
)
from autoremat.reporting import ResidentParts

INFEASIBLE = InfeasibleBudget(
    budget_nbytes=10_000_000_000,
    smallest_peak_nbytes=11_300_000_000,
    floor_nbytes=10_900_000_000,
    resident=ResidentParts(parameters_nbytes=2_200_000_000, optimizer_nbytes=4_000_000_000),
    step="mm_17",
    source="model.py:88",
    largest=(
        LiveValue("mm_16", 3_900_000_000, "model.py:80", "saved"),
        LiveValue("tangents_1", 1_200_000_000, kind="gradient"),
    ),
)
CHOSEN = OverBudget(
    1000, 2000, 500, ResidentParts(10), choice='policy="every-layer"', optimal_peak_nbytes=900
)
WARNING = FallbackWarning("AR101", "`cond` (model.py:12) is not understood.")
OVER = OverBudgetWarning(5_100_000_000, 5_000_000_000, 4_990_000_000)


def test_an_infeasible_budget_says_fact_cause_and_remedy() -> None:
    """The message has the numbers, the step, the culprits and what to do."""
    assert str(INFEASIBLE) == (
        "Budget 10.0 GB is below the smallest peak found, 11.3 GB "
        "(proven floor of this step's operations 10.9 GB). "
        "At `mm_17` (model.py:88), 6.2 GB are resident (2.2 GB parameters, 4.0 GB optimizer "
        "state), and the largest live values are "
        "`mm_16` 3.9 GB (saved, model.py:80), `tangents_1` 1.2 GB (gradient). "
        'Raise the budget to 11300000000 bytes (budget="11300000000B") or reduce what is live: '
        "a smaller batch or sequence, lower precision, or splitting the operation at the peak."
    )


def test_an_infeasible_budget_has_its_numbers_as_attributes() -> None:
    """A program can raise the budget to `smallest_peak_nbytes` and try again."""
    assert INFEASIBLE.budget_nbytes == 10_000_000_000
    assert INFEASIBLE.smallest_peak_nbytes == 11_300_000_000
    assert INFEASIBLE.floor_nbytes == 10_900_000_000
    assert INFEASIBLE.resident_nbytes == 6_200_000_000
    assert (INFEASIBLE.step, INFEASIBLE.source) == ("mm_17", "model.py:88")
    assert INFEASIBLE.largest[0].nbytes == 3_900_000_000


def test_a_budget_just_below_the_smallest_peak_does_not_look_equal_to_it() -> None:
    """Sizes that differ in a late digit are written with that digit."""
    error = InfeasibleBudget(10_000_000_000, 10_000_000_001, 9_999_999_999, ResidentParts(1))
    text = "Budget 10.000000000 GB is below the smallest peak found, 10.000000001 GB"
    assert text in str(error)


def test_a_floor_that_is_reached_is_called_the_lowest() -> None:
    """Where floor and smallest peak meet, no better plan exists; of what is said in the message."""
    text = "the smallest peak found, 2.0 kB (proven to be the lowest of this step's operations)."
    assert text in str(InfeasibleBudget(1000, 2000, 2000, ResidentParts(10)))


def test_where_nothing_is_proven_nothing_is_called_proven() -> None:
    """Under Inductor the floor is what is resident, which says nothing of other plans."""
    text = str(InfeasibleBudget(1000, 2000, 10, ResidentParts(10)))
    assert "the smallest peak found, 2.0 kB (a lower one is not ruled out)." in text
    assert "proven" not in text


def test_a_resident_part_above_the_budget_gets_its_own_remedy() -> None:
    """Recompute cannot shrink parameters and optimizer state; what they are comes first."""
    resident = ResidentParts(parameters_nbytes=2000, batch_nbytes=1000)
    assert str(InfeasibleBudget(1000, 5000, 3000, resident)) == (
        "Budget 1.0 kB is below what is resident under every plan, 3.0 kB (2.0 kB parameters, "
        "1.0 kB batch). A plan that is known without a search peaks at 5.0 kB; others may take "
        'less. Raise the budget to 5000 bytes (budget="5000B"), which is accepted, or make the '
        "resident part smaller, since it exceeds the budget by itself: parameters in lower "
        "precision, an optimizer with less state, sharding."
    )


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("error", [INFEASIBLE, CHOSEN, WARNING, FallbackError.of(WARNING), OVER])
def test_errors_and_warnings_cross_process_borders(error: Exception, protocol: int) -> None:
    """Pickled and copied, they keep type, text and attributes."""
    for twin in (pickle.loads(pickle.dumps(error, protocol)), copy.deepcopy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)


def test_a_fallback_has_a_code_and_a_sentence() -> None:
    """The warning and its strict twin, the error, say the same."""
    with pytest.warns(FallbackWarning, match="^AR101: `cond`"):
        warnings.warn(WARNING, stacklevel=1)
    error = FallbackError.of(WARNING)
    assert (error.code, error.sentence) == (WARNING.code, WARNING.sentence)
    assert str(error) == "AR101: `cond` (model.py:12) is not understood."


@pytest.mark.parametrize("code", ["", "101", "AR1", "AR1010", "ar101"])
def test_a_code_has_one_form(code: str) -> None:
    """Codes are stable names that tools match; a stray one is a bug."""
    with pytest.raises(ValueError, match="not of the form"):
        FallbackWarning(code, "Something happened.")


def test_exceptions_have_the_types_that_callers_catch() -> None:
    """Errors are RuntimeErrors, warnings are UserWarnings."""
    assert issubclass(InfeasibleBudget, RuntimeError)
    assert issubclass(FallbackError, RuntimeError)
    assert issubclass(FallbackWarning, UserWarning)
    assert issubclass(OverBudgetWarning, UserWarning)


def test_a_step_over_the_budget_says_by_how_much() -> None:
    """Measured, allowed, predicted, and what to do."""
    assert str(OVER) == (
        "Measured peak 5.1 GB is above the budget 5.0 GB by 100.0 MB; the plan predicts 5.0 GB. "
        "Something in the step holds memory that the plan does not see. "
        "Lower the budget by 100.0 MB to make room for it."
    )


def test_a_step_over_the_budget_as_its_plan_said_is_not_told_to_lower_the_budget() -> None:
    """Where a later graph of the step did not fit, nothing is unseen and less would not help."""
    assert str(OverBudgetWarning(1_200_000, 1_000_000, 1_250_000)) == (
        "Measured peak 1.2 MB is above the budget 1.0 MB by 200.0 kB; the plan predicts 1.2 MB. "
        "It is the plan that does not fit: a part of the step found too much live already and "
        "runs as lean as it can. Raise the budget, remove the graph break, or set gradients to "
        "None before each step."
    )


@pytest.mark.parametrize("measured_nbytes", [None, 1_200_000])
def test_who_accumulates_gradients_is_not_told_to_drop_them(measured_nbytes: int | None) -> None:
    """They are needed where they are."""
    over = OverBudgetWarning(measured_nbytes, 1_000_000, 1_250_000)
    assert str(over).endswith(", or set gradients to None before each step.")
    over.accumulates = True
    assert "to None" not in str(over)
    last = "remove the graph break" if measured_nbytes else "return the loss"
    assert str(over).endswith(f"{last}.")


def test_a_step_over_the_budget_for_what_its_plan_did_not_know_is_told_what_would_help() -> None:
    """It is not said to be as lean as can be, and a lower budget leaves room."""
    over = OverBudgetWarning(None, 1_000_000, 1_250_000)
    over.is_leanest = False
    assert str(over) == (
        "Predicted peak 1.2 MB is above the budget 1.0 MB: the plan was made without some of what "
        "the step holds (other graphs, calls before the backward, code in eager mode, other "
        "models, earlier batches and their gradients, larger inputs), and none is made for that. "
        "Lower the budget by 250.0 kB to make room for it, or have one module call all parts and "
        "return the loss."
    )


def test_an_error_of_some_ranks_names_them_on_all() -> None:
    """In front of what it says, and with its notes; a few names are enough."""
    INFEASIBLE.add_note("This respects save=.")
    told = on_ranks(copied(INFEASIBLE), (1, 3))
    del INFEASIBLE.__notes__
    assert isinstance(told, InfeasibleBudget)
    assert told.ranks == copied(told).ranks == (1, 3)
    assert str(told) == f"Ranks 1 and 3: {INFEASIBLE}"
    assert told.__notes__ == ["This respects save=."]
    assert str(on_ranks(CHOSEN, (0,))) == f"Rank 0: {CHOSEN}"
    assert str(on_ranks(PlanMismatch("No plan."), (2,))) == "Rank 2: No plan."
    error = FallbackError("AR101", "No plan.")
    assert str(on_ranks(error, tuple(range(9)))) == "AR101: Ranks 0, 1, 2, 3 and 5 more: No plan."
    lost = RankError((5,), "did not come.")
    assert str(copied(on_ranks(lost, (5, 6, 7)))) == "Ranks 5, 6 and 7 did not come."


def copied(error: Exception) -> Exception:
    """As another process gets it."""
    return pickle.loads(pickle.dumps(error))


@pytest.mark.parametrize("error", [INFEASIBLE, CHOSEN])
def test_a_refused_batch_is_memory_that_ran_out_to_libraries_that_look_for_one(
    error: InfeasibleBudget,
) -> None:
    """Also where it went through a pickle, or through Dynamo; what it says to people stays."""
    seen = [error, pickle.loads(pickle.dumps(error)), passing_through(error)]
    for name, function in (
        ("accelerate.utils.memory", "should_reduce_batch_size"),
        ("lightning.pytorch.utilities.memory", "is_oom_error"),
    ):
        is_out_of_memory = getattr(pytest.importorskip(name), function)
        assert all(is_out_of_memory(one) for one in seen)
    assert all("allocate memory" not in str(one) for one in seen)
    assert not any(isinstance(one, torch.OutOfMemoryError) for one in seen)


def test_where_no_smaller_batch_can_fit_it_is_a_refusal_alone() -> None:
    """What the batch does not change is above the budget: to try all sizes would be in vain."""
    resident = ResidentParts(parameters_nbytes=800, optimizer_nbytes=300, batch_nbytes=500)
    none_fits, one_may = (InfeasibleBudget(nbytes, 2000, 0, resident) for nbytes in (1099, 1100))
    assert none_fits.args == (str(none_fits),)
    assert one_may.may_fit_smaller_batch
    assert one_may.args != (str(one_may),)
    assert one_may.fact.startswith("Budget 1.1 kB is below")


def test_notes_of_a_refusal_survive_pickling() -> None:
    """They say what else would do."""
    error = copy.copy(INFEASIBLE)
    error.add_note("This respects save=.")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["This respects save=."]
