"""What a backward takes outside the planned graphs, foreseen before it begins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autoremat.memory.meter import measure_peak, storage_sizes
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
