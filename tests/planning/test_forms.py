"""The forms that steps have."""

from __future__ import annotations

from autoremat.planning.forms import Forms
from autoremat.planning.ran import Ran
from autoremat.planning.repeats import STEADY


def after(*steps: str) -> Forms:
    """What is known after steps that run these graphs: small and large letters are of a kind."""
    forms = Forms(str.upper)
    for step in steps:
        forms.note([[Ran(letter) for letter in step]])
        forms.step_is_over()
    return forms


def planned(forms: Forms, *, are_together: bool = True) -> list[str]:
    """The steps that are planned for."""
    found = forms.steps(are_together=are_together)
    return ["".join(ran.graph for part in parts for ran in part) for parts in found]


def test_a_step_may_have_the_most_runs_of_each_kind():
    """Where a kind stands in an order, it stands with all of its runs."""
    assert planned(after("AAAAB", "ABBB")) == ["AAAABBB"]
    assert planned(after("SAAAT", "SBT", "SAABT")) == ["SAAABT"]
    assert planned(after("aAAA", "a", "aB")) == ["aAAAB"]


def test_of_equal_steps_the_latest_counts():
    assert planned(after("aA", "AA")) == ["AA"]
    assert planned(after("AA", "A")) == ["AA"]
    assert planned(after("ABAB", "C", "abab"), are_together=False) == ["abab", "C"]


def test_of_as_many_runs_of_a_kind_the_latest_count():
    """Also where other kinds of an earlier step come with them: each stays in its place."""
    assert planned(after("ABA", "aa")) == ["aBa"]
    assert planned(after("ASB", "ATB", "aTb")) == ["aSTb"]


def test_each_graph_of_the_latest_steps_is_planned_for():
    """A critic that reads data, twice a step, and then once what a model has made."""
    forms = after("AA", "a", "AA")
    assert planned(forms) == ["AA"]
    for _ in range(STEADY - 1):
        [[[ran]]] = forms.others(forms.steps(are_together=True))
        assert ran.graph == "a"
        forms.note([[Ran("A"), Ran("A")]])
        forms.step_is_over()
    assert not forms.others(forms.steps(are_together=True))


def test_steps_of_other_kinds_may_come_together_until_many_have_not():
    """Whether they share kinds or not."""
    for steps, together in ((["SAA", "SB"], "SBAA"), (["AA", "B"], "BAA")):
        forms = after(*steps)
        assert planned(forms, are_together=False) == steps
        for _ in range(STEADY - 1):
            assert planned(forms) == [together]
            forms.note([[Ran(letter) for letter in steps[0]]])
            forms.step_is_over()
        assert planned(forms) == steps


def test_many_forms_are_kinds_that_come_and_go():
    assert planned(after("AB", "BC", "CD", "DE", "EA"), are_together=False) == ["ABCDE"]


def test_steps_of_several_parts_are_not_mixed():
    """Each is nested in its own way: the longer one counts."""
    forms = Forms(str.upper)
    forms.note([[Ran("A"), Ran("A")], [Ran("A")]])
    forms.note([[Ran("A")]])
    assert planned(forms) == ["AAA"]
    forms.note([[Ran("B")]])
    assert planned(forms) == ["AAA", "B"]
