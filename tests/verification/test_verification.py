"""What `verify` calls a difference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from autoremat.verification.whole_step import Verification, _largest_error

RIGHT = Verification(1e-7, 1e-7, "", 0.0, "eager", 10**8, 10**8, 10**9, 1e-4, loss=2.0)
NAN = torch.tensor([1.0, math.nan])
ONE = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(("theirs", "ours"), [(ONE, NAN), (NAN, ONE), (ONE, ONE * math.inf)])
def test_a_value_that_only_one_of_them_has_is_an_infinite_error(
    theirs: torch.Tensor, ours: torch.Tensor
) -> None:
    """Whatever comes after it in the list of parameters."""
    error, name = _largest_error({"a": theirs, "b": ONE}, {"a": ours, "b": ONE})
    assert error == math.inf
    assert name == "a"


def test_the_same_nan_in_both_is_no_difference() -> None:
    """A model that diverges in eager mode diverges in ours."""
    assert _largest_error({"a": NAN}, {"a": NAN.clone()}) == (0.0, "")


def test_complex_gradients_are_compared_whole() -> None:
    """The imaginary part counts."""
    a, b = torch.tensor([1 + 2j]), torch.tensor([1 + 1j])
    assert _largest_error({"a": a}, {"a": b})[0] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "change",
    [
        {"loss_error": 1.0},
        {"loss_error": math.inf},
        {"gradient_error": 0.1},
        {"buffer_error": math.inf},
        {"measured_peak_nbytes": 10**10},
    ],
)
def test_any_difference_is_not_ok(change: dict[str, float]) -> None:
    """Loss, gradients, buffers and peak each count."""
    assert RIGHT.ok
    assert not replace(RIGHT, **change).ok
