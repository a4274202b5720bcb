"""Deep calls have room on Python's stack."""

import resource
import weakref

import pytest
import torch

from autoremat.call_stack import named_by_users, users_level, with_stack_room

CALLS = 200
DEPTHS = range(300)


def leaf():
    a = b = c = d = 1
    return a + b + c + d


def faults_at(depth):
    """Pages newly mapped while a small function is called at a depth of the stack."""
    if depth:
        return faults_at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        leaf()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def most_faults():
    return max(faults_at(depth) for depth in DEPTHS)


def test_calls_at_no_depth_map_memory_again_and_again():
    if most_faults() < CALLS:
        pytest.skip("this interpreter keeps its stack in another way")
    assert with_stack_room(most_faults)() < CALLS / 2


def test_arguments_and_results_pass_through():
    @with_stack_room
    def quotient(number, *, by):
        """Divide."""
        return number / by

    assert quotient(6, by=3) == 2
    assert quotient.__doc__ == "Divide."
    with pytest.raises(ZeroDivisionError):
        quotient(1, by=0)


def test_the_users_line_is_the_first_that_is_neither_ours_nor_torchs():
    here = {"users_level": users_level, "__name__": "autoremat.deep"}
    exec("def ask(*_): return users_level()", here)  # the caller, whose level is 1
    around = {"ask": here["ask"], "__name__": "torch.nn"}
    exec("def call(): return ask()", around)
    assert users_level() == 1
    assert here["ask"]() == 2
    assert around["call"]() == 3


def names_of_users():
    return [value for _, values in named_by_users() for value in values]


def test_variables_and_globals_of_the_user_s_functions_are_read():
    thing = object()
    found = names_of_users()
    assert any(value is thing for value in found)
    assert any(value is names_of_users for value in found)


def test_no_variable_lives_longer_because_it_was_read():
    thing = torch.ones(1)
    seen = weakref.ref(thing)
    names_of_users()
    del thing
    assert seen() is None


def test_who_has_asked_for_variables_keeps_them_as_they_were():
    thing = object()
    known = locals()
    later = object()
    names_of_users()
    assert known["thing"] is thing
    assert "later" not in known
    assert later is not thing
