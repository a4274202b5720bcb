"""Ways to run a graph beside others, found by few searches."""

from __future__ import annotations

from typing import Any

import pytest
from autoremat_solver.policies import recompute_all
from torch import Tensor

from autoremat.ask.options import Setting
from autoremat.cost.device_specs import find_spec
from autoremat.planning import ways
from autoremat.planning.nesting import Beside
from autoremat.planning.sharing import Way
from autoremat.problem.lower import as_written
from tests.joint_graphs import leaf, subject_of

EAGER = Setting(compiler="eager", spec=find_spec("A100 80GB"))


def chain(x: Tensor) -> Tensor:
    """Operations whose results the backward needs."""
    for _ in range(8):
        x = (x.exp() @ x).cumsum(0)
    return x.sum()


def test_what_more_room_to_keep_does_not_change_is_found_once(monkeypatch: pytest.MonkeyPatch):
    """Limits above what the freest plan keeps: the budget binds there, not the limit."""
    subject = subject_of(chain, leaf(64, 64), EAGER)
    problem = subject.lowered.problem
    lean, rich = (ways.way_of(subject, policy(problem)) for policy in (recompute_all, as_written))
    budget_nbytes = problem.resident_nbytes + int(
        0.7 * max(rich.forward_nbytes, rich.backward_nbytes)
    )
    asked: dict[int, Way] = {}
    search = ways._fastest

    def note(subject: Any, found: Beside, limit_nbytes: int, *rest: Any) -> list[Way]:
        new = search(subject, found, limit_nbytes, *rest)
        asked[limit_nbytes] = new[-1]
        return new

    monkeypatch.setattr(ways, "_fastest", note)
    found = ways.ways_of(subject, Beside(), lean.crossing_nbytes, budget_nbytes, EAGER)
    highest, *others = asked
    assert highest == max(asked)
    assert 0 < len(others) < 8
    assert all(limit < asked[highest].crossing_nbytes for limit in others)
    assert {lean, rich, *asked.values()} <= set(found)
