"""How a budget is written, and how sizes are written back."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoremat.ask.budget import Budget
from autoremat.units import format_nbytes, format_nbytes_apart, format_us

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


@pytest.mark.parametrize(
    ("budget", "nbytes"),
    [
        ("40GB", 40 * 10**9),
        ("40GiB", 40 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("0.1 TB", 10**11),
        ("40 gb", 40 * 10**9),
        ("  40\tGIB ", 40 * 2**30),
        ("11300000000B", 11_300_000_000),
        (12_345, 12_345),
    ],
)
def test_a_budget_is_a_size_with_a_unit_or_a_number_of_bytes(budget: object, nbytes: int) -> None:
    """Decimal and binary units, decimals, any case, blanks, and plain integers are accepted."""
    asked = Budget.parse(budget)
    assert asked.nbytes() == nbytes
    assert asked == Budget(nbytes)
    assert not asked.is_share


@pytest.mark.parametrize(
    ("budget", "nbytes"), [("80%", 800), ("100 %", 1000), ("12.5%", 125), ("99.99%", 999)]
)
def test_a_percentage_is_a_share_of_the_device_rounded_down(budget: str, nbytes: int) -> None:
    """Only a percentage needs to know of what."""
    asked = Budget.parse(budget)
    assert asked.is_share
    assert asked.nbytes(1000) == nbytes
    assert asked != Budget(nbytes)


def test_a_budget_may_be_a_word() -> None:
    """For the device only, whose free memory is known later."""
    assert Budget.parse(" Auto ").is_free
    assert Budget.parse("min").is_least
    assert Budget.parse("min") != Budget.parse("auto")
    with pytest.raises(ValueError, match=r"such as \"80%\"\. It must"):
        Budget.parse("min", whole="a plate")


@pytest.mark.parametrize(
    "budget",
    [
        "40 gigs",
        "automatic",
        "40",
        "40G",
        "GB",
        "",
        " ",
        "nan",
        "inf",
        "nanGB",
        "-40GB",
        "+40GB",
        "1e3GB",
        "1,5GB",
        ".5GB",
        "4 0GB",
        "0GB",
        "0.1B",
        "0%",
        "120%",
        "-5%",
        "%",
        "٤GB",
        "9" * 5000 + "GB",
        0,
        -1,
        True,
        False,
        None,
        40e9,
        float("nan"),
        float("inf"),
        Decimal(40),
        b"40GB",
        ["40GB"],
    ],
)
def test_a_malformed_budget_names_the_accepted_forms(budget: object) -> None:
    """Everything else is a ValueError that shows the budget and what would be accepted."""
    with pytest.raises(ValueError, match=r"Budget .* Accepted: .*40GB.*40GiB.*80%") as caught:
        Budget.parse(budget)
    assert len(str(caught.value)) < 500


def test_a_percentage_of_an_unknown_memory_is_refused() -> None:
    """A device that reports no memory needs a budget in bytes."""
    with pytest.raises(ValueError, match=r"unknown here\. Give the budget in bytes"):
        Budget.parse("80%").nbytes()


def test_a_share_below_a_byte_is_refused() -> None:
    """At once if no device is that large, else when its memory is known."""
    with pytest.raises(ValueError, match=r"'0\.00000000001%' is not above zero"):
        Budget.parse("0.00000000001%")
    with pytest.raises(ValueError, match=r"'0\.01%' is not above zero bytes\. .* of a plate such"):
        Budget.parse("0.01%", whole="a plate").nbytes(1000)


@settings(deadline=None)
@given(st.integers(1, 10**15), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_parsing_is_exact(count: int, unit: str, blank: str) -> None:
    """No float is involved: every integer count of a unit is that many bytes."""
    assert Budget.parse(f"{count}{blank}{unit}").nbytes() == count * UNITS[unit]


@settings(deadline=None)
@given(st.integers(1, 10**15), st.booleans())
def test_formatted_sizes_parse_back_within_their_digits(nbytes: int, binary: bool) -> None:
    """A formatted size is itself a valid budget, within half of its last digit."""
    text = format_nbytes(nbytes, binary=binary)
    unit = {name.lower(): size for name, size in UNITS.items()}[text.split()[1].lower()]
    assert abs(Budget.parse(text).nbytes() - nbytes) <= unit / 20 + 1


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (12_600_000, "12.6 MB"),
        (999_960_000, "1.0 GB"),
        (11_300_000_000, "11.3 GB"),
        (-1_200_000, "-1.2 MB"),
        (5 * 10**15, "5000.0 TB"),
    ],
)
def test_sizes_are_written_in_decimal_units(nbytes: int, text: str) -> None:
    """Exact below one kB, one digit above, never 1000.0 of a unit that has a successor."""
    assert format_nbytes(nbytes) == text


def test_sizes_are_written_in_binary_units_on_request() -> None:
    """GiB are 2^30 bytes; below one KiB the size is exact."""
    assert format_nbytes(3 * 2**29, binary=True) == "1.5 GiB"
    assert format_nbytes(1023, binary=True) == "1023 B"


@settings(deadline=None)
@given(st.integers(0, 10**15), st.integers(-3, 3))
def test_two_different_sizes_never_look_alike(first: int, difference: int) -> None:
    """Two sizes in one sentence get as many digits as tell them apart."""
    second = max(0, first + difference)
    texts = format_nbytes_apart(first, second)
    assert (texts[0] == texts[1]) == (first == second)


def test_durations_are_written_in_the_unit_that_reads_well() -> None:
    """Microseconds, milliseconds, seconds."""
    assert [format_us(us) for us in (12, 1900, 999_990, 2.3e6)] == [
        "12.0 us",
        "1.9 ms",
        "1.0 s",
        "2.3 s",
    ]
