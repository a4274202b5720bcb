"""Plans that are tried beside the chosen one: the other way to write it out, and other plans."""

from __future__ import annotations

from typing import Any

import pytest
from autoremat_solver.policies import recompute_all

from autoremat.ask.options import Setting
from autoremat.inductor.reading import Reading
from autoremat.planning import reader as module
from autoremat.planning.choice import Choice, given
from autoremat.planning.reader import Reader
from autoremat.planning.rivals import rivals
from autoremat.problem.subject import Subject
from tests.joint_graphs import subject_of
from tests.tiny import Blocks, many_rows

KIB = 1 << 10
SETTING = Setting(compiler="inductor", time_limit_s=1.0)


@pytest.fixture(name="subject", scope="module")
def _subject() -> Subject:
    return subject_of(Blocks(), many_rows(), Setting(compiler="eager"))


def asked(
    subject: Subject,
    monkeypatch: pytest.MonkeyPatch,
    in_order: tuple[int, float],
    where_read: tuple[int, float] | Exception,
    *,
    lays_out: bool = True,
    method: str = "given",
    most: int = 2,
) -> tuple[Choice, list[Choice]]:
    """A chosen plan, and its rivals, where each way takes so many KiB above residents, and us."""
    resident = subject.lowered.shell.resident_nbytes

    def read_once(_: Subject, _forward: Any, backward: Any) -> Reading:
        is_moved = any("where_read" in node.name for node in backward.graph.nodes)
        figure = where_read if is_moved else in_order
        if isinstance(figure, Exception):
            raise figure
        return Reading(*[resident + figure[0] * KIB] * 2, figure[1])

    monkeypatch.setattr(module, "read_once", read_once)
    monkeypatch.setattr(module._torch, "prefers_channels_last", lambda _: lays_out)
    budget = resident + 100 * KIB
    problem = subject.lowered.problem
    chosen = Reader(subject, budget).read(given(problem, recompute_all(problem), method))
    return chosen, rivals(subject, budget, SETTING, chosen, most)


@pytest.mark.parametrize(
    ("in_order", "where_read", "words"),
    [
        ((50, 9.0), (60, 8.5), "given, in the plan's order"),
        ((50, 8.5), (60, 9.0), "given, made where read"),
    ],
)
@pytest.mark.parametrize(
    "method", ["given", "given, made where read", "given, in the plan's order"]
)
def test_the_other_way_to_write_the_plan_out_is_tried_first(
    subject, monkeypatch, in_order, where_read, words, method
):
    """What its code is foretold to take may be a few percent off; a stored winner has its name."""
    chosen, others = asked(subject, monkeypatch, in_order, where_read, method=method)
    assert others[0].method == words
    assert others[0].solution.plan == chosen.solution.plan
    assert others[0].in_order != chosen.in_order
    assert len(others) == 2
    assert others[1].solution.plan != chosen.solution.plan


@pytest.mark.parametrize(
    ("in_order", "where_read"),
    [
        ((50, 9.0), (60, 10.0)),  # it is foretold to be much slower
        ((50, 9.0), (110, 8.5)),  # it does not fit
        ((50, 9.0), (50, 9.0)),  # it is the same
        ((50, 9.0), RuntimeError("no such wrapper")),
    ],
)
def test_a_way_that_cannot_win_is_not(subject, monkeypatch, in_order, where_read):
    """There are few steps to try plans in."""
    chosen, others = asked(subject, monkeypatch, in_order, where_read)
    assert others
    assert chosen.solution.plan not in [one.solution.plan for one in others]


def test_alone_it_is_tried_only_if_it_is_foretold_to_be_no_slower(subject, monkeypatch):
    """Else one that takes less, and moves less, may win more."""
    chosen, others = asked(subject, monkeypatch, (50, 9.0), (60, 9.5), most=1)
    assert [one.solution.plan == chosen.solution.plan for one in others] == [False]
    chosen, others = asked(subject, monkeypatch, (50, 9.0), (110, 9.0), most=1)
    assert [one.solution.plan == chosen.solution.plan for one in others] == [False]
    chosen, others = asked(subject, monkeypatch, (80, 9.0), (60, 9.0), most=1)
    assert [one.solution.plan == chosen.solution.plan for one in others] == [True]


def test_where_there_is_one_way_other_plans_are_tried(subject, monkeypatch):
    """As before there were two."""
    chosen, others = asked(subject, monkeypatch, (50, 9.0), (60, 8.5), lays_out=False)
    assert others
    assert chosen.solution.plan not in [one.solution.plan for one in others]
