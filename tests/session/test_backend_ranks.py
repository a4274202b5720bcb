"""Ranks whose graphs come by `torch.compile`'s backend: one plan, and one refusal, for all."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from autoremat_solver import Link
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import autoremat
from autoremat.backend import session_behind
from autoremat.cost import host_link
from autoremat.problem.shell import has_copies
from tests.process_group import on_ranks
from tests.session.test_ranks import BUDGET, FIRST, LAST, ROWS, Mixed, batch, own_times
from tests.training import make_seeded, step

OPTIONS: dict[str, Any] = {"compiler": "eager", "strict": True, "verbose": False}


def compiled(budget: int | str, **asked: Any) -> nn.Module:
    """A model whose graphs are the backend's."""
    model = make_seeded(Mixed)
    model.compile(backend="autoremat", options=OPTIONS | {"budget": budget} | asked)
    return model


def saved_by(model: nn.Module) -> tuple[int, list[tuple[str, ...]]]:
    """The budget that was planned for, and what each graph keeps for its backward."""
    session = session_behind(model.parameters())
    assert session is not None
    return session.steps.budget_nbytes, [g.saved for g in session.stored_plan().graphs]


# --- what runs on each rank ---------------------------------------------------------------------


def budgets_and_times_differ(rank: int) -> Any:
    """Without a meeting each rank would make a plan of its own."""
    inner = compiled(BUDGET + 100_000 * rank)
    model = DistributedDataParallel(inner)
    with own_times(rank):
        for _ in range(2):
            step(model, (batch(),))
    return saved_by(inner)


def refused_on_one(rank: int) -> Any:
    """The last rank's batch does not fit; then the user takes a smaller one, and all go on."""
    inner = compiled(BUDGET)
    model = DistributedDataParallel(inner)
    with own_times(FIRST), pytest.raises(autoremat.InfeasibleBudget) as refused:
        step(model, (batch(4 * ROWS if rank == LAST else ROWS),))
    step(model, (batch(),))
    return refused.value, len(saved_by(inner)[1])


def options_differ(rank: int) -> Any:
    """The last rank was asked for another policy."""
    inner = compiled(1 << 40, policy="sqrt" if rank == LAST else "optimal")
    step(DistributedDataParallel(inner), (batch(),))


def sharded_after_compile(rank: int) -> Any:
    """FSDP2: a batch that does not fit on the last rank, while the first one's hooks gather."""
    from torch.distributed.fsdp import fully_shard

    model = compiled(BUDGET)
    fully_shard(model)
    with own_times(FIRST), pytest.raises(autoremat.InfeasibleBudget) as refused:
        step(model, (batch(4 * ROWS if rank == LAST else ROWS),))
    step(model, (batch(),))
    return refused.value, len(saved_by(model)[1])


def one_has_compiled_before(rank: int) -> Any:
    """The last rank has called the model by itself; in the wrapper it compiles nothing more."""
    inner = compiled(BUDGET)
    with own_times(FIRST):
        if rank == LAST:
            step(inner, (batch(),))
        model = DistributedDataParallel(inner)
        for _ in range(2):
            step(model, (batch(),))
    return saved_by(inner)


def one_does_not_come(rank: int) -> Any:
    """The last rank does not train."""
    model = DistributedDataParallel(compiled(BUDGET))
    if rank == FIRST:
        step(model, (batch(),))


one_does_not_come.timeout_s = 3  # type: ignore[attr-defined]


def both_train_alone(rank: int) -> Any:
    """No wrapper: nobody is waited for."""
    inner = compiled(BUDGET)
    if rank == LAST:
        step(inner, (batch(),))
    return distributed.get_world_size()


def values_wait(rank: int) -> Any:
    """Ranks have measured other links; all that is worth making again is to be saved."""
    link = Link(1000.0 * (1 + rank), 2000.0 / (1 + rank), 5.0)
    saved = ("aten.addmm", "aten.gelu", "aten.exp", "aten.sin", "aten.tanh")
    with mock.patch.object(host_link, "_measured", return_value=link):
        inner = compiled(BUDGET, offload="disk:.", save=saved, time_limit=2.0)
        model = DistributedDataParallel(inner)
        for _ in range(3):
            step(model, (batch(),))
    session = session_behind(inner.parameters())
    assert session is not None
    return [graph.schedule for graph in session.stored_plan().graphs]


# --- what must come of it -----------------------------------------------------------------------

USUAL = (
    *(budgets_and_times_differ, refused_on_one, sharded_after_compile, options_differ),
    values_wait,
)
OTHERS = (one_has_compiled_before, one_does_not_come, both_train_alone)


@pytest.fixture(name="usual", scope="module")
def _usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return on_ranks({s.__name__: s for s in USUAL}, tmp_path_factory.mktemp("usual"))


def test_one_budget_and_one_plan(usual):
    """The smallest counts, and the times that the first rank measured."""
    one, other = usual["budgets_and_times_differ"]
    assert one == other
    assert one[0] == BUDGET


@pytest.mark.parametrize("scenario", ["refused_on_one", "sharded_after_compile"])
def test_what_one_rank_cannot_do_is_refused_by_all(usual, scenario: str):
    """With its name, and nobody waits in a collective; what fits is planned then."""
    (first, _), (second, _) = outcomes = usual[scenario]
    assert str(first) == str(second)
    assert str(first).startswith("Rank 1: Budget 400.0 kB is below the smallest peak found, ")
    assert [graphs for _, graphs in outcomes] == [1, 1]


def test_ranks_that_were_asked_for_different_plans_are_named(usual):
    """All of them say which argument it is."""
    one, other = usual["options_differ"]
    assert isinstance(one, autoremat.errors.SteeringError)
    assert str(one) == str(other)
    assert "policy" in str(one)


def test_ranks_send_the_same_values_away(usual):
    """At the same times, by the link that the first of them has measured."""
    one, other = usual["values_wait"]
    assert one == other
    assert any(has_copies(schedule) for schedule in one)


@pytest.mark.thorough
def test_ranks_that_come_otherwise(tmp_path):
    """One has compiled before, one does not come, one trains by itself."""
    found = on_ranks({s.__name__: s for s in OTHERS}, tmp_path)
    one, other = found["one_has_compiled_before"]
    assert one == other
    assert isinstance(found["one_does_not_come"][FIRST], autoremat.RankError)
    assert found["both_train_alone"] == [2, 2]
