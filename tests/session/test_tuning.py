"""With `tune=N` the first steps try other plans that fit, and the fastest stays."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import autoremat
from autoremat.session import tuning
from autoremat.session.capturing import Capturing
from autoremat.session.reports import COMPILES, TUNED
from autoremat.session.tuning import schedule
from tests.tiny import Blocks, many_rows
from tests.training import Peaks, make_seeded, measured, optimized, peaks, same, step

BATCH = many_rows()
STEPS = 9
TRIED = 11  # steps from the first to the end of the tuning: two before it, of which one compiles


@pytest.fixture(name="bounds", scope="module")
def _bounds() -> Peaks:
    return peaks(Blocks, [BATCH])


class Clock:
    """Steps that take as long as somebody says of the plan that they run by."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.now_s = seconds, 0.0
        self.model: nn.Module | None = None

    def perf_counter(self) -> float:
        return self.now_s

    def step(self) -> str:
        """One step, and the method of its plan."""
        assert self.model is not None
        step(self.model, [BATCH])
        method = method_of(self.model)
        self.now_s += next((s for name, s in self.seconds.items() if name in method), 1.0)
        return method


@pytest.fixture(name="clock")
def _clock() -> Iterator[Clock]:
    clock = Clock({})
    with mock.patch.object(tuning, "time", clock):
        yield clock


def method_of(model: nn.Module) -> str:
    return autoremat.report(model).graphs[0].method


def fact(model: nn.Module, name: str) -> str:
    return next((f.text for f in autoremat.report(model).facts if f.name == name), "")


def test_each_other_plan_is_compiled_in_a_step_that_does_not_count():
    """After that all take turns, until the steps are spent."""
    assert schedule(3, 9) == [0, 1, 1, 2, 2, 0, 1, 2, 0]
    assert schedule(2, 3) == [0, 1, 1]
    assert schedule(1, 9) == []


@pytest.mark.parametrize("fastest", ["every-layer", "leaner", "ILP"])
def test_the_fastest_as_measured_stays_and_nothing_is_compiled_later(bounds, clock, fastest):
    """Whatever the model says of it."""
    clock.seconds = {fastest: 0.5}
    clock.model = optimized(Blocks, bounds.at(0.6), tune=STEPS)
    methods = [clock.step() for _ in range(TRIED)]
    assert len(set(methods)) == 3
    compiles = fact(clock.model, COMPILES)
    later = {clock.step() for _ in range(4)}
    assert len(later) == 1
    assert fastest in later.pop()
    stays = re.search(r"([^;]*) \(stays\)", fact(clock.model, TUNED))
    assert stays is not None
    assert fastest in stays[1]
    assert fact(clock.model, COMPILES).startswith(compiles.split(",")[0])


def test_a_call_without_a_backward_is_no_fast_step(bounds, clock):
    """It takes a moment, whatever the plan: that says nothing of it."""
    clock.seconds = {"leaner": 0.5}
    clock.model = model = optimized(Blocks, bounds.at(0.6), tune=STEPS)
    for number in range(TRIED + 1):
        if number in (6, 8):
            model(BATCH.clone())  # a batch that is kept would count as held
            clock.now_s += 1e-3
        else:
            clock.step()
    assert "(stays)" in fact(model, TUNED)
    assert "1.0 ms" not in fact(model, TUNED)


@pytest.mark.thorough
def test_a_second_tuning_of_the_same_graphs_goes_by_its_own_times(bounds, clock):
    """What a job has agreed on for the first one is not asked of the second."""
    heard: dict[str, Any] = {}

    def settled(found: dict[str, Any], kind: type) -> dict[str, Any]:
        return {key: heard.setdefault(key, one) for key, one in found.items()}

    stayed = []
    with mock.patch.object(tuning, "settled", settled):
        for fastest in ("every-layer", "leaner"):
            clock.seconds = {fastest: 0.5}
            clock.model = optimized(Blocks, bounds.at(0.6), tune=STEPS)
            stayed.append([clock.step() for _ in range(TRIED + 1)][-1])
    assert stayed[0] == "every-layer"
    assert "leaner" in stayed[1]


def test_each_plan_keeps_the_budget_and_the_gradients(bounds):
    """Those that are tried, and the one that stays.

    Planning allocates too, so no step that compiles is measured: the first, fourth and sixth.
    """
    budget = bounds.at(0.6)
    model = optimized(Blocks, budget, tune=STEPS)
    plain = step(make_seeded(Blocks), [BATCH])
    for _ in range(2):
        same(step(model, [BATCH]), plain)
    for _ in range(TRIED):
        assert measured(model, [BATCH]) <= budget  # odd steps
        same(step(model, [BATCH]), plain)
    assert fact(model, TUNED)


def test_a_plan_that_is_only_tried_is_not_stored(bounds, clock, tmp_path):
    """A file has the plan from before, and after the tuning the one that stays."""
    clock.seconds = {"every-layer": 0.5}
    clock.model = model = optimized(Blocks, bounds.at(0.6), tune=STEPS)
    stored = []
    for number in range(TRIED + 1):
        clock.step()
        autoremat.save_plan(model, tmp_path / str(number))
        stored.append((tmp_path / str(number)).read_text())
    assert len(set(stored[:-1])) == 1
    assert stored[-1] != stored[0]


@pytest.mark.thorough
def test_where_no_other_plan_fits_nothing_is_tried(bounds, clock):
    """At the smallest peak."""
    clock.model = optimized(Blocks, bounds.smallest, tune=STEPS)
    assert len({clock.step() for _ in range(4)}) == 1
    assert fact(clock.model, TUNED) == "no other plan to try"
    assert fact(clock.model, COMPILES).startswith("1,")


def test_a_plan_that_cannot_be_compiled_is_told_and_not_taken(bounds, clock):
    """The step goes on by the plan before it."""
    clock.model = optimized(Blocks, bounds.at(0.6), tune=STEPS, strict=False)
    clock.step()

    def fail(*_: Any) -> None:
        raise RuntimeError("no")

    with (
        mock.patch.object(Capturing, "compile", fail),
        pytest.warns(autoremat.FallbackWarning, match="AR116"),
    ):
        methods = [clock.step() for _ in range(TRIED)]
    assert len(set(methods)) == 1
    same(step(clock.model, [BATCH]), step(make_seeded(Blocks), [BATCH]))


def test_the_backend_tunes_as_well(bounds):
    """`torch.compile` with options."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"budget": bounds.at(0.6), "compiler": "eager", "tune": STEPS}
    model = torch.compile(
        make_seeded(Blocks), backend="autoremat", options={**options, "verbose": False}
    )
    for _ in range(TRIED + 1):
        step(model, [BATCH])
    assert "(stays)" in fact(model, TUNED)


def test_ranks_of_a_job_keep_the_same(bounds, clock):
    """What the first of them has found, though another plan was faster on the second."""
    heard: dict[str, Any] = {}

    def settled(found: dict[str, Any], kind: type) -> dict[str, Any]:
        return {key: heard.setdefault(key, one) for key, one in found.items()}

    stayed = []
    for fastest in ("every-layer", "leaner"):
        clock.seconds = {fastest: 0.5}
        clock.model = optimized(Blocks, bounds.at(0.6), tune=STEPS)
        with (
            mock.patch.object(tuning, "settled", settled),
            mock.patch.object(tuning, "tunings", Counter()),  # a rank is a process of its own
        ):
            stayed.append([clock.step() for _ in range(TRIED + 1)][-1])
    assert stayed == ["every-layer"] * 2


@pytest.mark.parametrize("count", [1, 2, -1, 2.5, True])
def test_a_number_of_steps_is_asked_for(count):
    """Of which three are the fewest that compare anything."""
    with pytest.raises(ValueError, match="0 or at least 3"):
        autoremat.optimize(Blocks(), "1GB", tune=count)


def test_a_fixed_policy_leaves_nothing_to_tune():
    """It is one of the two."""
    with pytest.raises(ValueError, match=r"every-layer.*give one of the two"):
        autoremat.optimize(Blocks(), "1GB", policy="every-layer", tune=5)
