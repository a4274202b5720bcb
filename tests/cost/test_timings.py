"""Which measured times are believed."""

import pytest

from autoremat.cost.timings import ROUNDS, Timing, implausible, is_settled


def mm(*rounds_us: float, expected_us: float = 5.0, operator: str = "mm") -> Timing:
    return Timing(rounds_us, operator, expected_us)


def test_what_takes_long_is_measured_less_often():
    """By the quietest round: load does not end them early."""
    assert not is_settled([10.0] * (ROUNDS - 1))
    assert is_settled([10.0] * ROUNDS)
    assert not is_settled([20_000.0] * (ROUNDS - 1))
    assert is_settled([70_000.0] * 3)
    assert not is_settled([300_000.0])
    assert is_settled([300_000.0, 300_000.0])
    assert not is_settled([4_000.0, 300_000.0])


def test_rounds_that_agree_are_believed():
    """Up to threefold, and whatever the worst of them took."""
    assert not implausible({"a": mm(10.0, 29.0), "b": mm(10.0, 11.0, 900.0)})


def test_rounds_that_contradict_each_other_are_not():
    assert implausible({"a": mm(10.0, 140.0)}) == {"a"}


def test_one_round_is_no_proof():
    assert implausible({"a": mm(10.0)}) == {"a"}


def test_of_two_equal_calls_the_slow_one_is_doubted():
    assert implausible({"fast": mm(10.0, 10.0), "slow": mm(140.0, 141.0)}) == {"slow"}


@pytest.mark.parametrize(("slow_us", "first"), [(140.0, ROUNDS), (300_000.0, 2)])
def test_what_is_slow_in_two_rounds_more_than_the_first_is_believed(slow_us: float, first: int):
    """The first ones may all lie within one burst of load."""
    fast = mm(10.0, 10.0)
    assert implausible({"fast": fast, "slow": mm(*[slow_us] * (first + 1))}) == {"slow"}
    assert not implausible({"fast": fast, "slow": mm(*[slow_us] * (first + 2))})


@pytest.mark.parametrize(
    "other",
    [
        mm(140.0, 141.0, operator="bmm"),
        mm(140.0, 141.0, expected_us=70.0),
        mm(14.0, 15.0, expected_us=7.5),
    ],
    ids=["another operator", "a larger size", "as its size tells"],
)
def test_what_cannot_be_compared_contradicts_nothing(other: Timing):
    assert not implausible({"fast": mm(10.0, 10.0), "other": other})
