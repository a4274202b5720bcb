"""Deep calls have room on Python's stack."""

import resource

import pytest

from autoremat.call_stack import users_level, with_stack_room

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
