"""Compiled code of one graph: it is kept for what it was compiled for, and for nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autoremat.session.code import Code


def part(schedule: str, method: str = "ILP", *, in_order: bool = True) -> Any:
    """A planned graph, of which a plan is what is asked."""
    solution = SimpleNamespace(plan=schedule)
    choice = SimpleNamespace(solution=solution, method=method, in_order=in_order)
    return SimpleNamespace(planned=object(), choice=choice, shrunk=1)


@pytest.mark.parametrize(
    ("later", "compiles"),
    [
        (part("a b a"), 1),
        (part("a b b"), 2),
        (part("a b a", "by hand"), 2),
        (part("a b a", in_order=False), 2),  # Inductor makes something else of it
    ],
)
def test_code_is_kept_for_plans_that_are_written_out_alike(later: Any, compiles: int) -> None:
    """A graph that is planned anew often has the plan that it had."""
    code: Code = Code(part("a b a"), lambda: "first", lambda _: lambda: "again")
    code.keep([later])
    compiled, of = code.of(later)
    assert compiled() == ("first" if compiles == 1 else "again")
    assert of is later
    assert code.compiles == compiles


def test_a_plan_that_equals_a_known_one_has_its_code() -> None:
    """What the plan says of sizes or of runs is no part of its code."""
    code: Code = Code(part("a b a"), lambda: "first", lambda _: lambda: "again")
    equal = part("a b a")
    compiled, of = code.of(equal)
    assert (compiled(), of) == ("first", equal)
    assert code.compiles == 1


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("is_new", [False, True])
def test_where_a_plan_cannot_be_compiled_the_one_asked_for_last_stays(
    is_kept: bool, is_new: bool
) -> None:
    """It may be an older one again, or equal it; a part of the ranges stands in for none."""
    again = iter([lambda: "second", lambda: "smaller", None])
    first = part("a b a")
    code: Code = Code(first, lambda: "first", lambda _: next(again))
    code.of(part("a b b"))
    last = part("a b a") if is_new else first
    if is_kept:
        code.keep([last])
    code.of(last)
    smaller = part("a b")
    smaller.shrunk = 2
    assert code.of(smaller)[0]() == "smaller"
    failed = part("a a b")
    for _ in range(2):  # it is tried once
        compiled, of = code.of(failed)
        assert (compiled(), of) == ("first", last)
