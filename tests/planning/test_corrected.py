"""What a reading found not to be there is not there in the next search."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from autoremat_solver import Op, Phase, Plan, Problem, Value, check, simulate
from autoremat_solver.policies import save_all_but
from torch import nn

import autoremat
from autoremat.memory.meter import resident_nbytes
from autoremat.planning.corrected import corrected

RESIDENT = 1000


def step(*outputs: str) -> Problem:
    """Two forward values, and a backward that makes one from each."""
    values = tuple(Value(name, n) for name, n in (("a", 10), ("b", 400), ("gb", 400), ("ga", 10)))
    ops = (
        Op("fa", (), ("a",), 1.0),
        Op("fb", ("a",), ("b",), 2.0),
        Op("bb", ("b",), ("gb",), 4.0, 0, Phase.BACKWARD, recomputable=False),
        Op("ba", ("a", "gb"), ("ga",), 4.0, 0, Phase.BACKWARD, recomputable=False),
    )
    return Problem(values, ops, outputs, resident_nbytes=RESIDENT)


def peak(problem: Problem, plan: Plan) -> int:
    return simulate(problem, plan).peak_nbytes


@pytest.mark.parametrize("read_nbytes", [1410, 1500, 1700])
def test_the_plan_has_the_peak_that_was_read(read_nbytes: int) -> None:
    """Nothing else of the plan changes; of other plans what the backward alone makes does."""
    problem = step()
    plan = save_all_but(problem)
    found = corrected(problem, plan, read_nbytes)
    assert found is not None
    assert peak(problem, plan) == 1810
    assert peak(found, plan) == read_nbytes
    assert not check(found, plan)
    assert simulate(found, plan).time_us == simulate(problem, plan).time_us
    changed = [v.name for v in problem.values if v != found.value_by_name[v.name]]
    assert changed == ["gb"]


@pytest.mark.parametrize("read_nbytes", [1800, 1810, 1900])
def test_what_was_read_as_it_was_modelled_corrects_nothing(read_nbytes: int) -> None:
    """Nor does what was read to be more: a value may be missing, not too large."""
    assert corrected(step(), save_all_but(step()), read_nbytes) is None


def test_what_the_forward_makes_or_the_step_returns_keeps_its_size() -> None:
    """Other plans save other values of the forward; what is returned is there."""
    problem = step("gb")
    found = corrected(problem, save_all_but(problem), 1100)
    assert found is None


def test_what_takes_the_memory_of_another_keeps_its_size() -> None:
    """A smaller result would have no room for what it writes over."""
    problem = step()
    over = tuple(replace(op, overwrites=("b",)) if op.name == "bb" else op for op in problem.ops)
    problem = replace(problem, ops=over)
    assert peak(problem, save_all_but(problem)) == RESIDENT + 420
    found = corrected(problem, save_all_but(problem), RESIDENT + 300)
    assert found is not None
    assert found.value_by_name["gb"].nbytes == 400


class LanguageModel(nn.Module):
    """Layers whose loss takes more than they do."""

    def __init__(self, vocabulary: int = 512, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and the logits."""
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits


def plan(budget: int, **options: object) -> autoremat.Report:
    torch.manual_seed(0)
    ids = torch.randint(512, (2, 128))
    return autoremat.plan(LanguageModel(), ids, budget=budget, verbose=False, **options)


@pytest.mark.thorough
@pytest.mark.inductor
def test_no_budget_is_refused_that_recomputing_every_layer_keeps() -> None:
    """Simulated it takes more than the smallest; its code takes less."""
    by_hand = plan(1 << 40, policy="every-layer")
    found = plan(by_hand.predicted_peak_nbytes)
    assert found.is_within_budget
    assert found.predicted_time_us <= by_hand.predicted_time_us
    resident = resident_nbytes(LanguageModel(), torch.randint(512, (2, 128)))
    with pytest.raises(autoremat.InfeasibleBudget) as refused:
        plan(resident + (by_hand.predicted_peak_nbytes - resident) // 2)
    assert refused.value.smallest_peak_nbytes <= by_hand.predicted_peak_nbytes
