"""Plans as Inductor compiles them: written out in its order, or in the plan's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from autoremat_solver import Plan
from autoremat_solver.policies import recompute_all

from autoremat.ask.options import Setting
from autoremat.ask.plan_file import StoredPlan, digest
from autoremat.inductor.reading import Reading
from autoremat.planning import reader as module
from autoremat.planning.asked import choose_stored, store
from autoremat.planning.choice import given
from autoremat.planning.first_found import choose_once
from autoremat.planning.reader import Reader, fastest_of, is_faster, leanest
from autoremat.problem.lower import as_written
from autoremat.problem.subject import Subject
from tests.joint_graphs import subject_of
from tests.tiny import Blocks, many_rows

KIB = 1 << 10


@pytest.fixture(name="subject", scope="module")
def _subject() -> Subject:
    return subject_of(Blocks(), many_rows(), Setting(compiler="eager"))


@pytest.fixture(name="read")
def _read(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Reads what somebody says of the plan's order and of Inductor's: KiB above, and us."""

    def reader(*figures: tuple[int, float | None] | Exception, lays_out: bool = True) -> Any:
        resident = subject.lowered.shell.resident_nbytes
        read_of: list[bool] = []

        def read_once(_: Subject, _forward: Any, backward: Any) -> Reading:
            in_order = not any("where_read" in node.name for node in backward.graph.nodes)
            read_of.append(in_order)
            figure = figures[0 if in_order else 1]
            if isinstance(figure, Exception):
                raise figure
            nbytes = resident + figure[0] * KIB
            return Reading(nbytes, nbytes, figure[1])

        monkeypatch.setattr(module, "read_once", read_once)
        monkeypatch.setattr(module._torch, "prefers_channels_last", lambda _: lays_out)
        return Reader(subject, resident + 100 * KIB), read_of

    return reader


def solution_of(subject: Subject, plan: Plan | None = None) -> Any:
    problem = subject.lowered.problem
    return given(problem, plan or recompute_all(problem), "given")


@pytest.mark.parametrize(
    ("figures", "in_order"),
    [
        (((50, 9.0), (60, 8.0)), False),  # both fit: the faster
        (((50, 8.0), (60, 9.0)), True),
        (((110, 8.0), (90, 9.0)), False),  # one fits
        (((90, 9.0), (110, 8.0)), True),
        (((120, 8.0), (110, 9.0)), False),  # none does: the leaner
        (((110, 9.0), (120, 8.0)), True),
        (((50, None), (60, 8.0)), True),  # of one nobody knows the time
    ],
)
def test_a_plan_is_written_out_as_it_fits_and_is_fastest(subject, read, figures, in_order):
    """Else as it takes less."""
    reader, _ = read(*figures)
    choice = reader.read(solution_of(subject))
    assert choice.in_order == in_order
    assert choice.code_us == figures[not in_order][1]
    names = [node.name for node in choice.backward.graph.nodes if "_recomputed" in node.name]
    assert names
    assert in_order != any("where_read" in name for name in names)


def test_a_way_is_read_once_and_the_other_only_if_it_is_asked_for(subject, read):
    """A reading lasts as long as half a compile."""
    reader, read_of = read((50, 9.0), (60, 8.0))
    for _ in range(2):
        assert reader.read(solution_of(subject), both=False).in_order
    assert read_of == [True]
    for _ in range(2):
        assert not reader.read(solution_of(subject)).in_order
    assert read_of == [True, False]
    assert reader.read(solution_of(subject), both=False).in_order


def test_a_plan_that_repeats_nothing_has_one_way(subject, read):
    """There is no order to hold."""
    reader, read_of = read((50, 9.0), (60, 8.0))
    plan = as_written(subject.lowered.problem)
    assert len(reader.ways(solution_of(subject, plan))) == 1
    assert read_of == [True]


def test_where_inductor_lays_out_nothing_there_is_one_way(subject, read):
    """What is made where the plan has it lies as it would lie anyway."""
    reader, read_of = read((50, 9.0), (60, 8.0), lays_out=False)
    assert len(reader.ways(solution_of(subject))) == 1
    assert read_of == [True]


def test_a_way_that_cannot_be_read_is_left_out(subject, read):
    """What the plan's order takes is known all the same; and nobody tries again."""
    reader, read_of = read((50, 9.0), RuntimeError("no such wrapper"))
    for _ in range(2):
        assert reader.read(solution_of(subject)).in_order
    assert read_of == [True, False]
    broken, _ = read(RuntimeError("no such wrapper"), (50, 9.0))
    with pytest.raises(RuntimeError, match="no such wrapper"):
        broken.read(solution_of(subject))


@pytest.mark.parametrize(
    ("figures", "alike"),
    [
        (((100, 9.0), (100, 9.0)), True),
        (((100, 9.0), (100, 9.2)), False),
        (((102, 9.0), (100, 9.0)), False),
        (((100, None), (100, 9.0)), True),
        (((100, 9.0), RuntimeError("no such wrapper")), False),
    ],
)
def test_whether_it_matters_is_told(subject, read, figures, alike):
    """By what is above the residents, and by the time; not by what nobody has read."""
    reader, _ = read(*figures)
    solution = solution_of(subject)
    assert not reader.ways_alike(solution)
    reader.read(solution)
    assert reader.ways_alike(solution) == alike
    assert not reader.ways_alike(solution_of(subject, as_written(subject.lowered.problem)))


@pytest.mark.parametrize("in_order", [True, False])
def test_a_plan_of_a_file_is_written_out_as_it_was(subject, read, in_order):
    """Whatever would be better for the budget at hand."""
    reader, read_of = read((50, 9.0 - in_order), (60, 8.5))
    choice = reader.read(solution_of(subject))
    assert choice.in_order == in_order
    stored = store(subject, choice)
    other = replace(stored, in_order=not in_order)
    assert digest(StoredPlan((stored,), "inductor")) != digest(StoredPlan((other,), "inductor"))
    read((50, 8.5), (60, 9.0 - in_order))
    del read_of[:]
    again = choose_stored(subject, stored, 1 << 40, reads=True)
    assert again is not None
    assert again.in_order == in_order
    assert str(again.backward.graph) == str(choice.backward.graph)


def test_of_choices_those_whose_code_is_known_are_compared_by_it(subject, read):
    """Of two plans; where nothing is known of one, by the model of both."""
    reader, _ = read((50, 9.0), (60, 8.0))
    lean = reader.read(solution_of(subject), both=False)
    whole = reader.read(solution_of(subject, as_written(subject.lowered.problem)), both=False)
    slow = replace(whole, code_us=10.0, needed_nbytes=whole.needed_nbytes + 1)
    assert fastest_of([slow, lean]) is lean
    assert is_faster(lean, slow)
    assert not is_faster(lean, slow, by=0.5)
    assert leanest([slow, lean]) is lean
    unknown = replace(slow, code_us=None)  # the model says that it repeats nothing
    assert fastest_of([lean, unknown]) is unknown
    assert is_faster(unknown, lean)


@pytest.mark.parametrize("figures", [((50, 9.0), (60, 8.0)), ((50, 8.0), (60, 9.0))])
def test_a_plan_that_was_found_before_is_written_out_alike(subject, read, figures):
    """Another process runs the code that this one has read."""
    reader, _ = read(*figures)
    budget = reader.budget_nbytes
    solution = solution_of(subject)
    first = choose_once(subject, budget, f"{figures}", lambda: reader.read(solution), reads=True)
    again = choose_once(subject, budget, f"{figures}", lambda: pytest.fail("known"), reads=True)
    assert first.in_order == again.in_order == (figures[0][1] == 8.0)
    assert str(again.backward.graph) == str(first.backward.graph)
