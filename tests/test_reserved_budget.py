"""What CUDA's allocator reserves, in plans for a GPU that is not here; and budgets of that.

The graphs are the CPU's (`compiler="eager"`), which takes no code generation.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.errors import InfeasibleBudget, OverReserved
from autoremat.reporting import Report

MIB = 1 << 20


class Deep(nn.Module):
    """Layers whose activations are of 3 MiB each, and a loss."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(layer(x))
        return x.square().mean()


class Broken(Deep):
    """The same in two graphs."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:4]:
            x = torch.sin(layer(x))
        torch._dynamo.graph_break()
        for layer in self.layers[4:]:
            x = torch.sin(layer(x))
        return x.square().mean()


class Recurrent(nn.Module):
    """A recurrent layer, which stays in eager mode, and one that is planned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(8, 8), nn.LSTM(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.last(self.layer(torch.sin(self.first(x)))[0])).sum()


def planned(
    budget: str | int = "100%", *, adamw: bool = False, kind: type[Deep] = Deep, **given: Any
) -> Report:
    model = kind().to("meta")
    optimizer = torch.optim.AdamW(model.parameters()) if adamw else None
    given = {"device": "H100", "compiler": "eager", "time_limit": 1.0, "verbose": False} | given
    x = torch.empty(3 * 512, 512, device="meta")
    return autoremat.plan(model, x, budget=budget, optimizer=optimizer, **given)


@pytest.fixture(scope="module")
def whole() -> Report:
    return planned()


def test_a_plan_for_a_gpu_says_what_is_reserved(whole: Report):
    """More than is allocated, which is more than the plan's own peak: cuBLAS keeps 32 MiB."""
    found = whole.reserved
    assert found is not None
    assert found.peak_nbytes >= found.default.allocated_nbytes
    assert found.default.allocated_nbytes >= whole.predicted_peak_nbytes + 32 * MIB
    assert found.idle_nbytes == found.peak_nbytes - found.at_peak_nbytes > 0
    assert found.peak_nbytes % (2 * MIB) == 0  # whole segments
    assert found.default.fits
    assert "by CUDA's allocator in 4 steps" in whole.summary()
    assert Report.from_json(whole.to_json()) == whole


def test_state_of_an_optimizer_and_its_temporaries_are_reserved(whole: Report):
    """AdamW: two states, and in its multi-tensor form one more copy of all parameters."""
    parameters = whole.resident.parameters_nbytes
    found = planned(adamw=True)
    assert found.resident.optimizer_nbytes >= 2 * parameters
    assert found.reserved is not None
    assert whole.reserved is not None
    more = found.reserved.default.allocated_nbytes - whole.reserved.default.allocated_nbytes
    assert more >= 2 * parameters


# Dynamo looks at `.grad` of what it resumes with after a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", [Deep, Broken])
@pytest.mark.parametrize("freeze", [(), "layers.0,layers.1,layers.2"])
def test_gradients_that_are_added_to_are_there_in_the_forward(
    kind: type[Deep], freeze: str | tuple[()]
):
    """As the plan has it, but for a loss: what is allocated is its peak and what cuBLAS keeps."""
    beyond = []
    for accumulate in (1, 2):
        setup = autoremat.TrainingSetup(accumulate=accumulate, freeze=freeze)
        found = planned(kind=kind, setup=setup)
        assert found.reserved is not None
        beyond.append(found.reserved.default.allocated_nbytes - found.predicted_peak_nbytes)
    assert abs(beyond[0] - beyond[1]) <= 512


def test_no_plan_for_the_cpu_reserves():
    """Its allocator keeps nothing back."""
    assert planned(device="cpu").reserved is None


def test_a_budget_may_be_of_what_is_reserved(whole: Report):
    """What is returned is within it, as emulated, and says how it was found."""
    assert whole.reserved is not None
    limit = whole.reserved.peak_nbytes - 8 * MIB
    found = planned(f"{limit}B reserved")
    assert found.reserved is not None
    assert found.reserved.budget_nbytes == found.budget_nbytes == limit
    assert found.reserved.peak_nbytes <= limit
    assert found.is_within_budget
    assert found.predicted_peak_nbytes < whole.predicted_peak_nbytes
    (how,) = (fact.text for fact in found.facts if fact.name == "Planned with")
    assert "of what is allocated" in how
    assert "within the" in found.summary()
    assert Report.from_json(found.to_json()) == found


def test_a_share_is_of_the_devices_memory(whole: Report):
    """And one plan is enough where there is room."""
    found = planned("50% reserved")
    assert found.budget_nbytes * 2 == found.reserved.device_nbytes
    assert found.predicted_peak_nbytes == whole.predicted_peak_nbytes


def test_a_budget_that_no_plan_reserves_within_is_refused_with_one_that_is_accepted():
    """The error names a budget; planned for, it is met."""
    with pytest.raises(OverReserved, match="below the smallest that a plan was found") as refused:
        planned(f"{46 * MIB}B reserved")
    smallest = refused.value.smallest_peak_nbytes
    assert smallest > 46 * MIB
    assert f'budget="{smallest}B reserved"' in str(refused.value)
    found = planned(f"{smallest}B reserved")
    assert found.reserved is not None
    assert found.reserved.peak_nbytes <= smallest


def test_a_budget_below_what_any_plan_allocates_is_refused_as_that():
    """Nothing is emulated."""
    with pytest.raises(InfeasibleBudget) as refused:
        planned("1MB reserved")
    assert not isinstance(refused.value, OverReserved)
    assert "never less, and more as a rule" in refused.value.__notes__[-1]


def test_where_a_part_has_no_plan_nobody_knows_what_is_reserved():
    """A layer that stays in eager mode: the report says nothing, and a budget of it is refused."""
    model = Recurrent().to("meta")
    x = torch.empty(4, 16, 8, device="meta")
    given = {"device": "H100", "compiler": "eager", "time_limit": 1.0, "verbose": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = autoremat.plan(model, x, budget="1GB", **given)
        assert report.fallbacks
        assert report.reserved is None
        with pytest.raises(ValueError, match="without a plan allocate: AR"):
            autoremat.plan(model, x, budget="1GB reserved", **given)


def test_where_nothing_reserves_such_a_budget_is_refused():
    """On the CPU, and where a step is going to run."""
    with pytest.raises(ValueError, match="planned for the CPU"):
        planned("1GB reserved", device="cpu")
    with pytest.raises(ValueError, match="Only plan"):
        autoremat.optimize(Deep(), "1GB reserved", verbose=False)


@pytest.mark.parametrize("budget", ["auto reserved", "min reserved", "7 reserved", "0GB reserved"])
def test_malformed_budgets_are_refused(budget: str):
    """With the text as it was given."""
    with pytest.raises(ValueError, match=budget):
        planned(budget)
