"""What users have without a solver is a candidate on the same footing as what is searched for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from autoremat_solver import Plan, Problem, Solution, Solver, check, simulate
from autoremat_solver.effort import CutOff
from autoremat_solver.plan import Status

from autoremat.ask.options import Setting
from autoremat.cost.device_specs import find_spec
from autoremat.planning import peers as module
from autoremat.planning import read
from autoremat.planning.peers import BY_LAYER, SELECTIVE, as_torch, faster_peers, peers
from autoremat.planning.read import PEERS
from autoremat.problem.subject import Subject
from tests.joint_graphs import subject_of
from tests.tiny import Blocks, many_rows

# Times by a data sheet: those that are measured of tiny operations differ from run to run.
EAGER = Setting(compiler="eager", spec=find_spec("A100 80GB"))


@pytest.fixture(name="subject", scope="module")
def _subject() -> Subject:
    return subject_of(Blocks(), many_rows(), EAGER)


def test_by_hand_and_by_torchs_settings(subject):
    """Each a plan of the graph."""
    found = dict(peers(subject))
    assert {BY_LAYER, SELECTIVE, "torch, budget 0.5"} <= found.keys()
    for plan in found.values():
        assert not check(subject.lowered.problem, plan)


def test_layers_are_made_again_and_selectively_their_products_are_not(subject):
    """Of the forward's matrix products none is repeated: the rest of a layer is."""
    found = dict(peers(subject))
    products = {op.name for op in subject.lowered.problem.ops if op.name.startswith("addmm")}
    assert products & found[BY_LAYER].recomputed
    assert not products & found[SELECTIVE].recomputed
    assert found[SELECTIVE].recomputed


def test_only_what_is_faster_and_may_fit_is_looked_at(subject):
    """The fastest first."""
    problem = subject.lowered.problem
    times = {name: simulate(problem, plan).time_us for name, plan in peers(subject)}
    above = max(times.values())
    found = [name for name, _ in faster_peers(subject, 1 << 40, above)]
    assert found
    assert [times[name] for name in found] == sorted(times[n] for n in times if times[n] < above)
    assert not faster_peers(subject, problem.resident_nbytes, above)


def test_what_torch_cannot_do_is_left_out(subject, monkeypatch: pytest.MonkeyPatch):
    """A comparison is no reason to fail."""

    def fail(*_: Any, **__: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(module._torch, "min_cut", fail)
    with pytest.raises(NotImplementedError):
        as_torch(subject, 0.5)
    assert {BY_LAYER, SELECTIVE} == {name for name, _ in peers(subject)}


class Reader:
    """Reads so many bytes for each plan as somebody says, else more than any budget."""

    def __init__(self, subject: Subject, budget_nbytes: int, nbytes: dict[str, int]) -> None:
        self.subject, self.budget_nbytes, self.nbytes = subject, budget_nbytes, nbytes
        self.code_us: float | None = None
        self.read_of: list[str] = []

    def ways_alike(self, _: Solution) -> bool:
        return False

    def read(self, solution: Solution, *, both: bool = True) -> Any:
        self.read_of.append(solution.method)
        nbytes = self.nbytes.get(solution.method, 1 << 50)
        fits = nbytes <= self.budget_nbytes
        return SimpleNamespace(
            solution=solution, needed_nbytes=nbytes, fits=fits, code_us=self.code_us
        )


def slow(problem: Problem, budget_nbytes: int, plan: Plan, *, gap: float) -> Any:
    """A choice that fits as it was modelled, and is proven to a gap."""
    timeline = simulate(problem, plan)
    solution = replace(
        Solver(problem).fastest(),
        plan=plan,
        timeline=timeline,
        status=Status.FEASIBLE,
        bound_us=timeline.time_us / (1 + gap),
    )
    return SimpleNamespace(
        solution=solution, needed_nbytes=timeline.peak_nbytes, fits=True, code_us=None
    )


@pytest.fixture(name="asked")
def _asked(subject: Subject) -> Any:
    """Every layer made again is what was found; the budget is what either is modelled at."""
    problem = subject.lowered.problem
    plans = dict(peers(subject))

    def chosen(
        nbytes: dict[str, int],
        *,
        gap: float,
        needed: int | None = None,
        filled_by: str = SELECTIVE,
        code_us: tuple[float, float] | None = None,
    ) -> Any:
        budget = simulate(problem, plans[filled_by]).peak_nbytes
        reader = Reader(subject, budget, nbytes)
        found = slow(problem, budget, plans[BY_LAYER], gap=gap)
        found.needed_nbytes = needed or found.needed_nbytes
        found.code_us, reader.code_us = code_us or (None, None)
        fastest = Solver(problem).fastest()
        taken = read._or_a_peer(reader, found, fastest, budget, CutOff(30.0))  # type: ignore[arg-type]
        return taken, found, reader

    return chosen


def test_a_plan_of_a_users_that_is_faster_and_fits_as_compiled_is_taken(asked):
    """Whatever the model says of its peak, within reason."""
    taken, found, _ = asked({SELECTIVE: 1}, gap=0.5)
    assert taken.solution.method == SELECTIVE
    assert taken.solution.timeline.time_us < found.solution.timeline.time_us


def test_what_does_not_fit_as_compiled_is_not_taken(asked):
    """And no more than a few are read."""
    taken, found, reader = asked({}, gap=0.5)
    assert taken is found
    assert 0 < len(reader.read_of) <= PEERS


def test_where_the_model_is_right_and_proves_the_plan_nobody_looks(asked):
    """A reading lasts as long as half a compile."""
    taken, found, reader = asked({SELECTIVE: 1}, gap=0.0, filled_by=BY_LAYER)
    assert taken is found
    assert not reader.read_of


def test_where_the_model_was_wrong_its_proof_is_worth_nothing(asked):
    """Another plan may take less than it says, too."""
    taken, _, _ = asked({SELECTIVE: 1}, gap=0.0, needed=1)
    assert taken.solution.method == SELECTIVE


def test_what_is_slower_as_compiled_is_not_taken(asked):
    """The model times operations one by one; the code that is read has what is fused."""
    taken, found, _ = asked({SELECTIVE: 1}, gap=0.5, code_us=(100.0, 99.5))
    assert taken is found
    taken, _, _ = asked({SELECTIVE: 1}, gap=0.5, code_us=(100.0, 98.0))
    assert taken.solution.method == SELECTIVE
