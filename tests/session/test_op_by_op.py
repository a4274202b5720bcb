"""What Inductor cannot compile by its plan is planned op by op, within the same budget."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat import _torch
from autoremat.emit.op_by_op import compile_eager
from autoremat.planning import pipeline
from autoremat.session import capturing, op_by_op
from tests.tiny import Chain, many_rows
from tests.training import UNBOUNDED, close, make_seeded, measured, optimized, step

pytestmark = pytest.mark.inductor
BUDGET = 260_000  # of which op by op all models here take less, and none without a plan


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fails at planned graphs of these numbers, counted from 1; what it compiles runs op by op."""
    failing: list[int] = []
    tries = 0
    original = capturing.compile_with_partition

    def compile_with_partition(*given: Any, executor: Any = None, **more: Any) -> Any:
        nonlocal tries
        compiled = original(*given, executor=executor or compile_eager, **more)
        tries += 1
        if tries in failing:
            raise _torch.InductorError(RuntimeError("no kernel"), None)
        return compiled

    monkeypatch.setattr(capturing, "compile_with_partition", compile_with_partition)
    return failing


class Dropping(Chain):
    """Draws random numbers first."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.1))


class Broken(Chain):
    """Two graphs, of which the second has the most to save."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x * self.layers[0].weight.mean())
        torch._dynamo.graph_break()
        return super().forward(x)


def codes(told: list[warnings.WarningMessage]) -> list[str]:
    """Of fallbacks, in the order in which they were told."""
    found = [warning.message for warning in told]
    return [w.code for w in found if isinstance(w, autoremat.FallbackWarning)]


def steps_told(model: nn.Module, *batches: Tensor) -> tuple[list[list[str]], list[int]]:
    """Codes told of in each of several steps, and their measured peaks."""
    found, peaks = [], []
    for batch in batches:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            peaks.append(measured(model, (batch,)))
        found.append(codes(told))
    return found, peaks


def inductors(make: Callable[[], nn.Module], budget: int = BUDGET, **more: Any) -> nn.Module:
    """Optimised for Inductor; not strict."""
    return optimized(make, budget, compiler="inductor", strict=False, **more)


def test_a_first_call_begins_again_op_by_op(inductor: list[int]) -> None:
    """Within its budget from the first step on, told once, with eager mode's random numbers."""
    inductor.append(1)
    model, x = inductors(Dropping), many_rows()
    with pytest.warns(autoremat.FallbackWarning, match=r"AR120.*no kernel.*compiler=\"eager\""):
        ours = step(model, (x,))
    close(step(make_seeded(Dropping), (x,)), ours, 1e-5)
    told, peaks = steps_told(model, x, x)
    assert told == [[], []]
    assert max(peaks) <= BUDGET < measured(make_seeded(Dropping), (x,))
    report = autoremat.report(model)
    assert (report.compiler, [f.code for f in report.fallbacks]) == ("eager", ["AR120"])


def test_the_step_after_one_that_ran_in_part_is_op_by_op(inductor: list[int]) -> None:
    """Its first graph has run: torch's own partition runs this step, which is not taken again."""
    inductor.append(2)
    told, peaks = steps_told(inductors(Broken), *3 * [many_rows()])
    assert told == [["AR107"], ["AR120"], []]
    assert max(peaks[1:]) <= BUDGET < peaks[0]


def test_another_size_that_cannot_be_compiled(inductor: list[int]) -> None:
    """The call begins again: Dynamo compiles before anything has run. So does the first size."""
    model, x = inductors(Chain), many_rows()
    half = x[: len(x) // 2]
    first, _ = steps_told(model, half)
    inductor.append(2)
    told, peaks = steps_told(model, x, x, half)
    assert (first, told) == ([[]], [["AR120"], [], []])
    assert max(peaks) <= BUDGET


class Counting(Chain):
    """Counts its calls in Python, before its only graph that needs a gradient."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        return super().forward(x)

    @torch.compiler.disable
    def count(self) -> None:
        self.calls += 1


def test_what_python_has_done_is_not_done_twice(inductor: list[int]) -> None:
    """Code in eager mode has run before the graph: the step is torch's, and the next one ours."""
    inductor.append(1)
    model = inductors(Counting)
    told, peaks = steps_told(model, *3 * [many_rows()])
    assert told == [["AR107"], ["AR120"], []]
    assert max(peaks[1:]) <= BUDGET
    assert model.calls == 3


def test_code_that_cannot_be_generated_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is met while the graph is planned, and torch's own partition fails in the same way."""

    def fail(*_: Any, **__: Any) -> Any:
        raise _torch.InductorError(RuntimeError("no code"), None)

    monkeypatch.setattr(pipeline, "choose_by_reading", fail)
    monkeypatch.setattr(op_by_op, "needs_its_plan", lambda *_: False)
    monkeypatch.setattr(capturing, "split_as_torch", fail)
    told, peaks = steps_told(inductors(Chain), many_rows(), many_rows())
    assert told == [["AR107", "AR120"], []]
    assert max(peaks) <= BUDGET


def test_an_operator_that_was_named_may_be_in_inductors_graphs_alone(inductor: list[int]) -> None:
    """AR107: op by op it might match nothing, which is an error."""
    inductor.append(1)
    told, _ = steps_told(inductors(Chain, recompute="aten.tanh"), many_rows(), many_rows())
    assert told[0][0] == "AR107"
    assert "AR120" not in [code for codes in told for code in codes]


def test_memory_that_runs_out_is_no_reason() -> None:
    """In the second compile, too: the call is taken again as lean as can be."""
    uncompiled = op_by_op.Uncompiled()
    with pytest.raises(torch.OutOfMemoryError):
        uncompiled.note(_torch.InductorError(torch.OutOfMemoryError(), None), has_run=False)
    assert not uncompiled.why


def test_a_graph_that_saves_all_is_left_to_torch(inductor: list[int]) -> None:
    """AR107: op by op it would be slower, and take no less."""
    inductor.append(1)
    told, _ = steps_told(inductors(Chain, UNBOUNDED), many_rows(), many_rows())
    assert told == [["AR107"], []]


def test_a_stored_plan_is_of_inductors_graphs(inductor: list[int], tmp_path: Path) -> None:
    """AR107: op by op there is none, and no other was asked for."""
    model = inductors(Chain)
    step(model, (many_rows(),))
    autoremat.save_plan(model, tmp_path / "plan.json")
    inductor.append(2)
    told, _ = steps_told(inductors(Chain, UNBOUNDED, plan=tmp_path / "plan.json"), many_rows())
    assert told == [["AR107"]]


def test_where_torchs_own_partition_cannot_be_compiled_either(inductor: list[int]) -> None:
    """Plain torch.compile ends in an error there."""
    inductor += [1, 2]
    told, _ = steps_told(inductors(Chain, UNBOUNDED), many_rows(), many_rows())
    assert told == [["AR107", "AR120"], []]
