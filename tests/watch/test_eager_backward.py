"""What a backward takes outside the planned graphs, foreseen before it begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autoremat.memory.meter import measure_peak
from autoremat.memory.storage_sizes import storage_sizes
from autoremat.watch import eager_backward
from autoremat.watch.eager_backward import foresee

CPU = torch.device("cpu")
FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "acos": lambda x: (x / 2).acos(),
    "amax": lambda x: x.amax(-1),
    "asinh": torch.asinh,
    "atan2": lambda x: torch.atan2(x, x + 1),
    "cos": torch.cos,
    "cumprod": lambda x: x.cumprod(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "division": lambda x: x / (x + 1),
    "erf": torch.erf,
    "highest of all": torch.max,
    "log of sum of exp": lambda x: x.logsumexp(-1),
    "log of cumulated sum of exp": lambda x: x.logcumsumexp(-1),
    "norm": lambda x: x.norm(dim=-1),
    "power": lambda x: x.pow(3),
    "product": lambda x: x.prod(-1),
    "standard deviation": lambda x: x.std(-1),
    "variance of all": torch.var,
}


@pytest.mark.parametrize("formula", FORMULAS)
def test_what_formulas_take_inside_is_foreseen(formula: str):
    """Also where the gradient that they are given is much smaller than the one that they make."""
    leaf = torch.rand(256, 500).requires_grad_()
    result = FORMULAS[formula](leaf * 1.5)
    gradient = torch.ones_like(result)
    foreseen = foresee(
        [result],
        [],
        known=set(storage_sizes([leaf, gradient, result], CPU)),
        saved_so_far={},
        device=CPU,
        keeps_graph=False,
    )
    foreseen_nbytes = foreseen.eager_peak_nbytes - foreseen.first_nbytes
    measured_nbytes = measure_peak(lambda: torch.autograd.backward(result, gradient), device="cpu")
    assert measured_nbytes <= 1.05 * foreseen_nbytes


ROWS, WIDE = 64, 16  # numbers in a row of the narrow tensor; how often wider the other one is


def beside_a_part(wide: Tensor, narrow: Tensor) -> Tensor:
    """Their gradients are parts of one, as those of a skip connection are."""
    return torch.cat([wide, narrow], 1)


def beside_the_same(wide: Tensor, narrow: Tensor) -> Tensor:
    """Both have the same gradient, as in a residual block."""
    return wide + narrow.repeat(1, WIDE)


@pytest.mark.parametrize("together", [beside_a_part, beside_the_same])
def test_a_gradient_stays_until_nobody_waits_for_any_of_it(
    together: Callable[[Tensor, Tensor], Tensor],
):
    """What was made first goes backward last: its gradient holds that of the other one, too."""
    leaves = [torch.rand(ROWS, count * ROWS).requires_grad_() for count in (1, WIDE)]
    narrow = leaves[0] * 2
    result = 2 * together(leaves[1] * 2 * 2 * 2, narrow)
    gradient = torch.ones_like(result)
    foreseen = foresee(
        [result],
        [],
        known=set(storage_sizes([*leaves, gradient, result], CPU)),
        saved_so_far={},
        device=CPU,
        keeps_graph=False,
    )
    foreseen_nbytes = foreseen.eager_peak_nbytes - foreseen.first_nbytes
    measured_nbytes = measure_peak(lambda: torch.autograd.backward(result, gradient), device="cpu")
    assert measured_nbytes == pytest.approx(foreseen_nbytes, rel=0.001)


class TwoResults(torch.autograd.Function):
    """Stands for a planned graph that returns two tensors."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(_ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        return one + other


class Waiting:
    """A run of it that holds nothing."""

    name, region, held_nbytes, again_nbytes, left_nbytes = "graph", 0, 0, 0, 0


@pytest.mark.parametrize(
    "together", [torch.add, torch.mul, lambda *both: torch.cat(both), lambda *both: both[0]]
)
def test_gradients_of_all_that_a_graph_returned_count_in_its_plan(
    together: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
):
    """Also where they are in one storage: nothing of it is there beside the graph."""
    result = 2 * together(*TwoResults.apply(torch.rand(64, 64).requires_grad_()))
    run = Waiting()
    monkeypatch.setattr(
        eager_backward, "run_of", lambda node: run if "TwoResults" in node.name() else None
    )
    foreseen = foresee([result], [run], known=set(), saved_so_far={}, device=CPU, keeps_graph=False)
    assert foreseen.beside_nbytes == {run: 0}


def test_what_a_variable_holds_stays_also_where_a_view_of_it_was_saved(
    monkeypatch: pytest.MonkeyPatch,
):
    """A target that is detached for the loss: the tensor that was saved is nobody else's."""
    target, result = torch.rand(ROWS, ROWS), torch.rand(ROWS, ROWS).requires_grad_() * 2
    run, planned = Waiting(), result.grad_fn
    monkeypatch.setattr(eager_backward, "run_of", lambda node: run if node is planned else None)
    loss = torch.nn.functional.mse_loss(result, target.detach())

    def beside_nbytes(*named: Tensor) -> int:
        foreseen = foresee(
            [loss],
            [run],
            known=set(storage_sizes([result], CPU)),
            saved_so_far={},
            device=CPU,
            keeps_graph=False,
            named=storage_sizes(named, CPU),
        )
        return foreseen.beside_nbytes[run]

    assert beside_nbytes(target) == beside_nbytes() + target.nbytes
