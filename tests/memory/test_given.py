"""What calls are given: each tensor once, and those that are held for later steps all at once."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import autoremat
from autoremat.memory.given import Given
from autoremat.memory.meter import measure_peak, resident_nbytes
from tests.tiny import Chain, many_rows
from tests.training import make_seeded, peaks

CPU = torch.device("cpu")
SHAPE = (7, 13)  # of no other test's tensors
NBYTES = 4 * 7 * 13
SLACK = 64  # bytes of single numbers that eager code makes


def batches(count: int) -> list[torch.Tensor]:
    return [torch.ones(SHAPE) for _ in range(count)]


def total(given: Given) -> int:
    return sum(given.sizes(CPU).values())


def test_what_is_given_again_counts_once():
    """In each step, as one that is kept for good."""
    given, held = Given(), batches(1)
    for _ in range(3):
        given.begin_step()
        given.note(held)
    assert len(given.tensors) == 1
    assert total(given) == NBYTES


def test_a_batch_that_is_gone_counts_no_more():
    """Each step makes its own."""
    given = Given()
    for _ in range(3):
        given.begin_step()
        batch = batches(1)
        given.note(batch)
        assert total(given) == NBYTES


def test_the_second_of_many_that_are_held_shows_all():
    """Those of other shapes, parameters, and what a step makes are none of them."""
    given, held, others = Given(), batches(5), [torch.ones(3), torch.ones(SHAPE).double()]
    weight = torch.ones(SHAPE, requires_grad=True)
    given.begin_step()
    given.note(held[:1])
    assert total(given) == NBYTES
    given.begin_step()
    given.note(held[1:2])
    assert total(given) == 5 * NBYTES
    assert {*map(id, given.tensors)}.isdisjoint(map(id, [*others, weight, weight.exp()]))


@pytest.mark.parametrize(
    "as_batch", [lambda t: t, lambda t: (t, 0), lambda t: {"inputs": t}, lambda t: [[t]]]
)
def test_batches_of_other_sizes_are_found_with_them(as_batch: Callable[[torch.Tensor], Any]):
    """In whatever the user keeps them; what is equal to them and kept elsewhere is none of them."""
    given, tensors = Given(), [torch.ones(rows, 13) for rows in (7, 5, 9, 4)]
    held, other = [as_batch(tensor) for tensor in tensors], torch.ones(SHAPE)
    for batch in tensors[:2]:
        given.begin_step()
        given.note([batch])
    assert total(given) == sum(tensor.nbytes for tensor in tensors)
    assert len(held) == 4
    assert id(other) not in map(id, given.tensors)


def test_calls_of_one_step_show_nothing():
    """Such as chosen and rejected: both are there anyway, and the step has made more by then."""
    given, held = Given(), batches(4)
    given.begin_step()
    given.note(held[:1])
    given.note(held[1:2])
    assert total(given) == 2 * NBYTES


def test_what_is_collected_is_searched_for_ever_less_often(monkeypatch: pytest.MonkeyPatch):
    """A user who keeps each batch: as many searches as the number has digits, in base two."""
    given, held, searches = Given(), [], []
    search = Given._search
    monkeypatch.setattr(Given, "_search", lambda *args: (searches.append(0), search(*args)))
    for _ in range(64):
        held += batches(1)
        given.begin_step()
        given.note(held[-1:])
    assert total(given) == 64 * NBYTES
    assert len(searches) < 8


@pytest.mark.parametrize("is_backend", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_batches_that_are_held_are_told_of_once(is_backend: bool):
    """The step's peak has them from the second step on; nothing is planned anew for each."""
    torch._dynamo.reset()
    held = [many_rows() + n for n in range(6)]
    found = peaks(Chain, (held[0],))
    budget = found.at(0.6) + 5 * held[0].nbytes - held[0].nbytes // 2
    model = make_seeded(Chain)
    options = {"compiler": "eager", "verbose": False, "time_limit": 2.0}
    if is_backend:
        model.compile(backend="autoremat", options=options | {"budget": budget})
    else:
        autoremat.optimize(model, budget, **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", autoremat.OverBudgetWarning)
        for batch in (*held, *held):
            model.zero_grad()
            model(batch).backward()
    assert len(told) <= 1
    compiles = next(f.text for f in autoremat.report(model).facts if f.name == "Compiles")
    assert int(re.findall(r"\d+", compiles)[0]) <= 2
    model.zero_grad(set_to_none=True)
    resident = resident_nbytes(model, held)
    peak = resident + measure_peak(lambda: model(held[0]).backward(), device="cpu")
    assert peak <= autoremat.report(model).predicted_peak_nbytes + SLACK <= budget + SLACK
