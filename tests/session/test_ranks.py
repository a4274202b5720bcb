"""Processes that train one model: the same plan on all of them, and nobody waits in vain."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import autoremat
from autoremat import OverBudgetWarning
from autoremat.ask import options
from autoremat.cost import op_times
from autoremat.optimized import optimized_call
from autoremat.planning import pipeline
from autoremat.planning.unsearched import choose_without_search
from autoremat.ranks import figures
from autoremat.session import steps
from tests.process_group import connect, on_ranks
from tests.training import make_seeded, step

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed")

WIDTH, ROWS = 32, 256
FIRST, LAST = 0, 1


class Mixed(nn.Module):
    """Four layers, each with activations of different costs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(nn.functional.gelu(layer(x)).exp().sin())
        return x.square().mean()


def batch(rows: int = ROWS) -> Tensor:
    """The same rows each time."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


BUDGET = 400_000  # of 222 kB at least and 640 kB without recompute
TOO_SMALL = 150_000


GIVEN: dict[str, Any] = {"compiler": "eager", "strict": True, "verbose": False}


def parallel(budget: int | str, **asked: Any) -> tuple[nn.Module, nn.Module]:
    """A model under a budget, and the same in DistributedDataParallel."""
    inner = autoremat.optimize(make_seeded(Mixed), budget, **GIVEN | asked)
    return inner, DistributedDataParallel(inner)


def saved_by(model: nn.Module) -> list[tuple[str, ...]]:
    """What each graph of the model keeps for its backward."""
    return [graph.saved for graph in optimized_call(model).session.stored_plan().graphs]


def trained(budget: int | str = BUDGET, rows: int = ROWS, **asked: Any) -> tuple[Any, float]:
    """What a model keeps, and the norm of its gradients after two steps."""
    inner, model = parallel(budget, **asked)
    for _ in range(2):
        gradients = step(model, (batch(rows),)).gradients
    norm = torch.stack([found.norm() for found in gradients.values() if found is not None]).norm()
    return saved_by(inner), float(norm)


@contextmanager
def own_times(rank: int) -> Iterator[None]:
    """Times that ranks do not agree on: on the last, what is slow on the others is fast."""
    slow, fast = ("gelu", "exp"), ("sin", "tanh")
    if rank == LAST:
        slow, fast = fast, slow

    def time_us(call: Any, _inputs: Any) -> float:
        name = str(call.target).split(".")[1]
        return 10.0 * (30.0 if name in slow else 1 / 30 if name in fast else 1.0)

    with mock.patch.object(op_times, "call_time_us", time_us):
        yield


def by_itself() -> Any:
    """Without the table of the job."""
    return mock.patch.object(figures, "shared_store", return_value=None)


# --- what runs on each rank ---------------------------------------------------------------------


def without_a_table(rank: int) -> Any:
    """Each rank plans with its own times."""
    with own_times(rank), by_itself():
        return trained()


def with_a_table(rank: int) -> Any:
    """The same times, measured at the same time."""
    with own_times(rank):
        return trained()


def one_is_warm_and_late(rank: int) -> Any:
    """The last rank has times on its disk, and compiles when the other has done so long ago."""
    with own_times(rank):
        if rank == LAST:
            with by_itself():
                step(autoremat.optimize(make_seeded(Mixed), BUDGET, **GIVEN), (batch(),))
            time.sleep(1.0)
        return trained()


def one_plans_first(rank: int) -> Any:
    """The last rank has planned the model already."""
    with own_times(rank):
        if rank == LAST:
            step(autoremat.optimize(make_seeded(Mixed), BUDGET, **GIVEN), (batch(),))
        distributed.barrier()
        with mock.patch.object(op_times, "call_time_us", side_effect=AssertionError):
            return trained()


def one_calls_alone_before(rank: int) -> Any:
    """The last rank has called the model by itself before the wrapper does."""
    inner, model = parallel(BUDGET)
    with own_times(FIRST):
        if rank == LAST:
            step(inner, (batch(16),))
        step(model, (batch(4 * ROWS if rank == FIRST else ROWS),))


def searches_differ(rank: int) -> Any:
    """On the last rank load has ended the search before it has found what the other has."""

    def cut_short(subject: Any, budget_nbytes: int, *_: Any, **__: Any) -> Any:
        return choose_without_search(subject, budget_nbytes, reads=False)

    search = cut_short if rank == LAST else pipeline.search
    with own_times(FIRST), mock.patch.object(pipeline, "search", search):
        return trained(450_000)


def shapes_differ(rank: int) -> Any:
    """Padding: the last rank has more rows than the first."""
    return trained(rows=ROWS + 32 * rank)


def sizes_differ(rank: int) -> Any:
    """The first rank may hold less, and the last one's optimizer has more state."""
    inner = make_seeded(Mixed)
    kind = torch.optim.Adam if rank == LAST else torch.optim.SGD
    optimizer = kind(inner.parameters())
    autoremat.optimize(inner, BUDGET + 100_000 * rank, optimizer=optimizer, **GIVEN)
    with own_times(FIRST):
        step(DistributedDataParallel(inner), (batch(),))
    report = autoremat.report(inner)
    return report.budget_nbytes, report.resident_nbytes, saved_by(inner)


def refused_on_one(rank: int) -> Any:
    """The last rank's batch does not fit; then the user takes a smaller one, and all go on."""
    inner, model = parallel(BUDGET)
    with own_times(FIRST), pytest.raises(autoremat.InfeasibleBudget) as refused:
        step(model, (batch(4 * ROWS if rank == LAST else ROWS),))
    step(model, (batch(),))
    return refused.value, len(saved_by(inner))


class Synced(Mixed):
    """Ranks talk in the middle of the forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x).exp()).sin()
        return super().forward(talked(x))


@torch.compiler.disable
def talked(x: Tensor) -> Tensor:
    """The same tensor, once all ranks have come here."""
    distributed.all_reduce(torch.zeros(1))
    return x


def refused_before_others_wait(rank: int) -> Any:
    """The last rank cannot plan the first of two graphs, and the ranks talk between them."""
    model = DistributedDataParallel(autoremat.optimize(make_seeded(Synced), TOO_SMALL, **GIVEN))
    step(model, (batch(ROWS if rank == LAST else 16),))


def too_large_later(rank: int) -> Any:
    """Once they train, the last rank gets a batch that does not fit."""
    _, model = parallel(BUDGET)
    with own_times(FIRST), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step(model, (batch(),))
        step(model, (batch(4 * ROWS if rank == LAST else ROWS),))
    return [warning.category for warning in told]


def fails_on_one(rank: int) -> Any:
    """The last rank's call raises what is none of ours."""
    _, model = parallel(BUDGET)
    step(model, (None if rank == LAST else batch(),))


def sizes_unknown_on_one(rank: int) -> Any:
    """The last rank cannot tell what its budget is a share of."""
    _, model = parallel("80%")
    nbytes = 1 << 30 if rank == FIRST else 0
    with mock.patch.object(options, "device_nbytes", return_value=nbytes):
        step(model, (batch(),))


def options_differ(rank: int) -> Any:
    """The last rank was asked for another policy."""
    _, model = parallel(1 << 40, policy="sqrt" if rank == LAST else "optimal")
    step(model, (batch(),))


def plan_of_another_batch_on_one(rank: int) -> Any:
    """A stored plan, applied by all; then again, when it does not fit the last rank's batch."""
    inner, model = parallel(BUDGET)
    step(model, (batch(),))
    path = Path(os.environ["XDG_CACHE_HOME"]).with_name(f"plan of {rank}")
    autoremat.save_plan(inner, path)
    assert trained(plan=path)[0] == saved_by(inner)
    trained(plan=path, rows=ROWS + rank)


def one_does_not_come(rank: int) -> Any:
    """The last rank does not train."""
    _, model = parallel(BUDGET)
    if rank == FIRST:
        step(model, (batch(),))


def the_first_does_not_come(rank: int) -> Any:
    """The rank that would conclude does not train."""
    _, model = parallel(BUDGET)
    if rank == LAST:
        step(model, (batch(),))


def one_is_killed(rank: int) -> Any:
    """The last rank ends while it plans."""
    _, model = parallel(BUDGET)
    search = (
        mock.Mock(side_effect=lambda *_, **__: os._exit(1)) if rank == LAST else pipeline.search
    )
    with mock.patch.object(pipeline, "search", search):
        step(model, (batch(ROWS + rank),))


one_is_killed.timeout_s = 5  # type: ignore[attr-defined]
one_does_not_come.timeout_s = the_first_does_not_come.timeout_s = 3  # type: ignore[attr-defined]


def out_of_memory(*_args: Any, **_kwargs: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


def memory_runs_out_on_one(rank: int) -> Any:
    """In the first forward of the last rank: whether it was told, and gradients after it."""
    inner, model = parallel("100 MB", strict=False)
    runs_out = [out_of_memory] if rank == LAST else []
    note_run = steps.note_run

    def note(*args: Any, **kwargs: Any) -> Any:
        return runs_out.pop()() if runs_out else note_run(*args, **kwargs)

    with warnings.catch_warnings(record=True) as caught, mock.patch.object(steps, "note_run", note):
        warnings.simplefilter("always")
        gradients = step(model, (batch(),)).gradients
    told = [fallback.code for fallback in autoremat.report(inner).fallbacks]
    assert told == [w.message.code for w in caught if hasattr(w.message, "code")]
    found = [gradient for gradient in gradients.values() if gradient is not None]
    expected = step(make_seeded(Mixed), (batch(),)).gradients.values()
    return told, all(map(torch.allclose, found, expected))


def memory_runs_out_behind_a_gather(_rank: int) -> Any:
    """Both have gathered parameters by then."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(make_seeded(Mixed))
    autoremat.optimize(model, "100 MB", **GIVEN | {"strict": False})
    with mock.patch.object(steps, "note_run", out_of_memory):
        try:
            model(batch())
        except torch.OutOfMemoryError as error:
            return error.__notes__
    return []


def group_made_later(rank: int) -> Any:
    """The ranks know nothing of each other when they ask for plans, each under its own limit."""
    distributed.destroy_process_group()
    inner = autoremat.optimize(make_seeded(Mixed), BUDGET + 100_000 * rank, **GIVEN)
    store = Path(os.environ["XDG_CACHE_HOME"]).with_name("store of later")
    connect(store, rank, 2)
    with own_times(rank):
        step(DistributedDataParallel(inner), (batch(),))
    return saved_by(inner)


def one_trains_alone(rank: int) -> Any:
    """A model that is in no wrapper, such as a stage of a pipeline."""
    if rank == LAST:
        step(autoremat.optimize(make_seeded(Mixed), BUDGET, **GIVEN), (batch(),))
    return rank


# --- what must come of it -----------------------------------------------------------------------

USUAL = (one_is_warm_and_late, sizes_differ, refused_on_one, options_differ)
OTHERS = (
    *(without_a_table, with_a_table, one_plans_first, shapes_differ, too_large_later),
    *(fails_on_one, plan_of_another_batch_on_one, one_does_not_come, the_first_does_not_come),
    *(one_trains_alone, refused_before_others_wait, searches_differ, one_calls_alone_before),
    *(sizes_unknown_on_one, group_made_later, memory_runs_out_on_one),
    *(memory_runs_out_behind_a_gather, one_is_killed),
)


@pytest.fixture(scope="module", name="usual")
def _usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    named = {scenario.__name__: scenario for scenario in USUAL}
    return on_ranks(named, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module", name="others")
def _others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    named = {scenario.__name__: scenario for scenario in OTHERS}
    return on_ranks(named, tmp_path_factory.mktemp("ranks"), limit_s=280)


def test_a_rank_with_other_times_that_comes_late_has_the_same_plan(usual):
    """What the first rank stored in the job's table beats what the other has on its disk."""
    (first, norm), (last, same) = usual["one_is_warm_and_late"]
    assert first == last
    assert norm == same


def test_the_smallest_budget_and_the_largest_holding_count(usual):
    """Then the plans are the same, too."""
    first, last = usual["sizes_differ"]
    assert first == last
    budget_nbytes, resident_nbytes, _ = first
    parameters_nbytes = 4 * sum(p.numel() for p in Mixed().parameters())
    assert budget_nbytes == BUDGET
    assert resident_nbytes >= 3 * parameters_nbytes


def test_what_one_rank_cannot_do_is_refused_by_all(usual):
    """With its name and its numbers; then a batch that fits trains on all of them."""
    (first, _), (last, _) = outcomes = usual["refused_on_one"]
    assert [planned for _, planned in outcomes] == [1, 1]
    assert str(first) == str(last)
    assert first.ranks == last.ranks == (LAST,)
    assert str(first).startswith("Rank 1: Budget 400.0 kB is below the smallest peak found, 8")


def test_ranks_that_were_asked_for_different_plans_are_named(usual):
    """With the first argument that differs."""
    for error in usual["options_differ"]:
        assert isinstance(error, autoremat.SteeringError)
        assert str(error).startswith(
            "Rank 1 was asked for policy=sqrt, rank 0 for policy=optimal: "
        )


@pytest.mark.thorough
def test_without_the_table_these_times_give_two_plans(others):
    """So it is the table that makes one of them."""
    first, last = others["without_a_table"]
    assert first != last
    first, last = others["with_a_table"]
    assert first == last


@pytest.mark.thorough
def test_what_another_rank_has_found_is_not_looked_for_again(others):
    """Of times, although the ranks share no file; DDP's buckets make the plan another question."""
    first, last = others["one_plans_first"]
    assert first == last


@pytest.mark.thorough
def test_a_rank_that_has_called_the_model_alone_still_meets_the_others(others):
    """Once the wrapper calls it."""
    for error in others["one_calls_alone_before"]:
        assert isinstance(error, autoremat.InfeasibleBudget)
        assert error.ranks == (FIRST,)


@pytest.mark.thorough
def test_a_group_that_is_made_after_optimize_agrees_on_one_plan(others):
    """Its ranks meet at the first step."""
    first, last = others["group_made_later"]
    assert first == last
    assert any(first)


@pytest.mark.thorough
def test_searches_that_end_elsewhere_give_one_plan(others):
    """The first that was found counts for all."""
    first, last = others["searches_differ"]
    assert first == last


@pytest.mark.thorough
def test_ranks_with_different_shapes_train_together(others):
    """Each with a plan for its shapes: the gradients are those of all."""
    (_, first), (_, last) = others["shapes_differ"]
    assert first == last


@pytest.mark.thorough
def test_a_refusal_comes_before_what_the_first_graph_is_followed_by(others):
    """A collective of the forward finds no rank missing."""
    for error in others["refused_before_others_wait"]:
        assert isinstance(error, autoremat.InfeasibleBudget)
        assert error.ranks == (LAST,)


@pytest.mark.thorough
def test_once_all_train_a_batch_that_does_not_fit_is_a_warning(others):
    """An error of one rank would leave the others in a collective."""
    first, last = others["too_large_later"]
    assert first == []
    assert OverBudgetWarning in last


@pytest.mark.thorough
def test_an_error_of_one_rank_is_told_by_all(others):
    """The others say who failed with what."""
    first, last = others["fails_on_one"]
    assert isinstance(first, autoremat.RankError)
    assert first.ranks == (LAST,)
    assert type(last).__name__ in str(first)
    assert not isinstance(last, autoremat.RankError)


@pytest.mark.thorough
def test_a_rank_that_cannot_say_what_it_holds_is_named(others):
    """The others do not wait for it."""
    first, last = others["sizes_unknown_on_one"]
    assert isinstance(first, autoremat.RankError)
    assert first.ranks == (LAST,)
    assert "whose size is unknown here" in str(first)
    assert type(last) is ValueError


@pytest.mark.thorough
def test_a_stored_plan_that_does_not_fit_one_rank_is_refused_by_all(others):
    """With its name and the first difference."""
    for error in others["plan_of_another_batch_on_one"]:
        assert isinstance(error, autoremat.PlanMismatch)
        assert str(error).startswith("Rank 1: This is no plan of this model and batch. In graph 0")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("scenario", "absent", "limit_s"),
    [
        ("one_does_not_come", LAST, 3),
        ("the_first_does_not_come", FIRST, 3),
        ("one_is_killed", LAST, 5),
    ],
)
def test_a_rank_that_does_not_come_is_named(others, scenario, absent, limit_s):
    """As soon as the process group's timeout is over."""
    waiting = others[scenario][1 - absent]
    assert isinstance(waiting, autoremat.RankError)
    assert waiting.ranks == (absent,)
    assert str(waiting).startswith(f"Rank {absent} did not come within {limit_s} s")


@pytest.mark.thorough
def test_where_memory_runs_out_the_call_is_taken_again_unless_others_would_hear_it_twice(others):
    """Replicas communicate in their backward alone."""
    (told, equal), (told_last, equal_last) = others["memory_runs_out_on_one"]
    assert (told, told_last) == ([], ["AR117"])
    assert equal
    assert equal_last
    for (note,) in others["memory_runs_out_behind_a_gather"]:
        assert "part of this call has communicated with other ranks" in note


@pytest.mark.thorough
def test_a_model_in_no_wrapper_waits_for_nobody(others):
    """Other ranks may never call it."""
    assert others["one_trains_alone"] == [FIRST, LAST]


@pytest.mark.thorough
def test_four_ranks(tmp_path):
    """Each of them compiles at another time, and one of them cannot."""
    scenarios = {scenario.__name__: scenario for scenario in (one_is_warm_and_late, options_differ)}
    found = on_ranks(scenarios, tmp_path, 4, limit_s=280)
    plans = found["one_is_warm_and_late"]
    assert plans == plans[:1] * 4
    assert {str(error) for error in found["options_differ"]} == {str(found["options_differ"][0])}
