"""Which sizes vary, as users say it."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module

from autoremat.ask.options import Options
from autoremat.ask.sizes import Sizes, parse_sizes, rounded_up, sizes_argument
from autoremat.errors import SizeError


def forward(ids: Tensor, mask: Tensor | None = None, **more: Any) -> None:
    """A model's."""


def said(sizes: Sizes, *args: Any, **keywords: Any) -> dict[tuple[int, ...], dict[int, str]]:
    """By the shape of a tensor, the names of its sizes that vary."""
    found: dict[tuple[int, ...], dict[int, str]] = {}
    for one in sizes.among(forward, args, keywords):
        found.setdefault(tuple(one.tensor.shape), {})[one.dimension] = one.name
    return found


def test_words_mean_the_first_two_dimensions_of_every_input():
    sizes = parse_sizes({"batch": (1, 32), "sequence": (128, 4096)})
    ids, labels = torch.zeros(2, 200), torch.zeros(2)
    assert said(sizes, ids, labels=labels, more={"deep": [torch.zeros(2, 200, 7)]}) == {
        (2, 200): {0: "batch", 1: "sequence"},
        (2,): {0: "batch"},
        (2, 200, 7): {0: "batch", 1: "sequence"},
    }


def test_an_input_goes_by_the_name_that_forward_or_a_dict_gives_it():
    """Whether it is given by position or by keyword."""
    sizes = parse_sizes({"ids": {1: (8, 64)}, "pixels": {-1: (4, 8), 2: (4, 16)}})
    ids, pixels = torch.zeros(2, 9), torch.zeros(2, 3, 5, 6)
    expected = {
        (2, 9): {1: "ids.size(1)"},
        (2, 3, 5, 6): {3: "pixels.size(-1)", 2: "pixels.size(2)"},
    }
    assert said(sizes, ids, more={"pixels": pixels}) == expected
    assert said(sizes, ids=ids, pixels=pixels) == expected
    assert sizes.unmet(forward, (ids,), {}) == "pixels"
    assert sizes.unmet(forward, (ids,), {"pixels": pixels}) is None


def test_what_follows_many_inputs_has_the_name_that_it_is_given_by():
    """Those of `*args` have none."""

    def takes(*xs: Tensor, mask: Tensor | None = None) -> None: ...

    sizes = parse_sizes({"mask": {0: (1, 4)}})
    mask = torch.zeros(2)
    found = sizes.among(takes, (torch.zeros(4), torch.zeros(9)), {"mask": mask})
    assert [(one.tensor is mask, one.name) for one in found] == [(True, "mask.size(0)")]
    assert sizes.unmet(takes, (torch.zeros(4),), {}) is None  # None in this call, perhaps


def test_what_is_said_of_an_input_comes_before_what_is_said_of_all():
    sizes = parse_sizes({"batch": (1, 32), "mask": {0: (1, 4)}})
    found = sizes.among(forward, (torch.zeros(2, 8), torch.zeros(3, 8)), {})
    assert [(one.name, one.high) for one in found] == [("batch", 32), ("mask.size(0)", 4)]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rows": (1, 8)}, "without a dimension"),
        ({"batch": 8}, "its smallest and its largest"),
        ({"batch": (8, 1)}, "its smallest and its largest"),
        ({"batch": (0, 8)}, "its smallest and its largest"),
        ({"batch": (1, 2.5)}, "its smallest and its largest"),
        ({"ids": {"1": (1, 8)}}, "a dimension is a number"),
        ({1: (1, 8)}, "no name of an input"),
        ({}, "no size that varies"),
        ("all", "no size that varies"),
    ],
)
def test_what_means_nothing_is_refused(given: object, says: str):
    with pytest.raises(ValueError, match=says):
        parse_sizes(given)


def test_what_becomes_of_larger_ones_is_one_of_two():
    assert parse_sizes({"batch": (1, 8)}, "plan").on_larger == "plan"
    assert parse_sizes("seen").on_larger == "plan"
    with pytest.raises(ValueError, match='"raise" or "plan"'):
        parse_sizes({"batch": (1, 8)}, "warn")
    with pytest.raises(ValueError, match="is not given"):
        parse_sizes(None, "plan")


def test_an_input_without_the_dimension_is_named():
    with pytest.raises(ValueError, match="dimension 2 of ids, which has 2"):
        said(parse_sizes({"ids": {2: (1, 8)}}), torch.zeros(2, 3))


def test_the_backend_says_how_sizes_are_given_there():
    with pytest.raises(ValueError, match="mark_dynamic"):
        Options.from_mapping({"budget": "1MB", "sizes": {"batch": (1, 8)}})


def test_sizes_are_rounded_up_to_powers_of_two():
    assert [rounded_up(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


def test_an_error_of_a_size_has_the_numbers():
    error = SizeError("sequence", 5000, 4096)
    assert (error.name, error.size, error.highest) == ("sequence", 5000, 4096)
    assert "sequence is 5000 in this call, and the step was planned for at most 4096" in str(error)


BATCH = torch.export.Dim("batch", min=1, max=32)
AUTO = torch.export.Dim.AUTO


@pytest.mark.parametrize(
    "given",
    [
        {"ids": {0: BATCH, 1: AUTO(min=8, max=64)}},
        {"ids": (BATCH, AUTO(min=8, max=64)), "mask": None},
        {"ids": (BATCH, AUTO(min=8, max=64)), "mask": (None, torch.export.Dim.STATIC)},
        {"batch": {"ids": [BATCH, AUTO(min=8, max=64)]}},
    ],
)
def test_dynamic_shapes_of_torch_export_are_ranges(given: Any):
    """A dimension's name is that of the size; what does not vary is left out."""
    found = {(one, n): (e.name, e.low, e.high) for one, n, e in parse_sizes(given).inputs}
    assert found == {("ids", 0): ("batch", 1, 32), ("ids", 1): ("ids.size(1)", 8, 64)}


def test_a_word_and_a_derived_dimension_may_be_of_torch_export():
    sizes = parse_sizes({"batch": BATCH, "pairs": {0: 2 * BATCH}})
    assert [(n, e.low, e.high) for n, e in sizes.words] == [(0, 1, 32)]
    assert [(e.name, e.low, e.high) for *_, e in sizes.inputs] == [("2*batch", 2, 64)]


@pytest.mark.parametrize("dimension", [torch.export.Dim("length"), AUTO])
def test_a_dimension_without_a_maximum_is_refused(dimension: Any):
    with pytest.raises(ValueError, match="a plan is made for the largest size"):
        parse_sizes({"ids": {1: dimension}})


def test_a_command_line_says_the_same():
    found = sizes_argument("batch=1:32, sequence=128:4096,images.2=16:64,images.3=16:64")
    assert found == {
        "batch": (1, 32),
        "sequence": (128, 4096),
        "images": {2: (16, 64), 3: (16, 64)},
    }


@pytest.mark.parametrize("text", ["batch", "batch=32", "batch=1-32", "images.x=1:2", ""])
def test_what_a_command_line_cannot_mean_is_refused(text: str):
    with pytest.raises(ValueError, match="write batch=1:32"):
        sizes_argument(text)


class Read(Module):
    """One input."""

    def forward(self, ids: Tensor) -> None:
        """A model's."""


def forward_that_holds(model: Module) -> Callable[[Tensor], object]:
    """One that no class has."""

    def forward(words: Tensor) -> Module:
        return model

    return forward


def test_asking_what_a_model_takes_keeps_none():
    """Names are those of its own forward, also where that was replaced."""
    sizes, x = parse_sizes({"ids": {0: (1, 8)}, "words": {0: (1, 9)}}), torch.zeros(2, 3)
    plain, hooked, replaced = Read(), Read(), Read()
    hooked.forward = functools.partial(Read.forward, hooked)  # as accelerate's hooks do
    replaced.forward = forward_that_holds(replaced)
    for model, most in ((plain, 8), (hooked, 8), (replaced, 9), (plain, 8)):
        (found,) = sizes.among(model.forward, (x,), {})
        assert found.high == most
    gone = [weakref.ref(model) for model in (plain, hooked, replaced)]
    del plain, hooked, replaced, model
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3
