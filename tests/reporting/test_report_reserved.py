"""Reserved memory in a report: as text, as a page, as JSON."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoremat.reporting import Report, ReportError, ReservedCase, ReservedMemory
from tests.reporting.report_samples import UNIT_NBYTES, layered_report

MB = UNIT_NBYTES


def reserved(
    *others: ReservedCase, peak: int = 50 * MB, budget: int | None = None
) -> ReservedMemory:
    default = ReservedCase("", peak, 40 * MB, 9, fits=True)
    return ReservedMemory((default, *others), 42 * MB, (5 * MB, 2 * MB), 4, 60 * MB, budget)


EXPANDABLE = ReservedCase("expandable_segments:True", 44 * MB, 40 * MB, 2, fits=True)
SPLIT = ReservedCase("max_split_size_mb:20", 70 * MB, 40 * MB, 30, fits=False)


def with_reserved(found: ReservedMemory) -> Report:
    return replace(layered_report(), reserved=found)


def test_what_is_idle_and_what_helps_follow_from_the_cases():
    """The setting that lowers the peak the most, where it does by a hundredth and fits."""
    found = reserved(EXPANDABLE, SPLIT)
    assert found.idle_nbytes == 8 * MB
    assert found.helping == EXPANDABLE
    assert reserved(SPLIT).helping is None
    assert reserved(replace(EXPANDABLE, peak_nbytes=50 * MB - 1)).helping is None
    assert reserved(replace(EXPANDABLE, fits=False)).helping is None


def test_the_summary_has_one_line_of_it():
    """Peak, what was free then, and by how much a setting lowers it."""
    (line,) = (
        line
        for line in with_reserved(reserved(EXPANDABLE)).summary().splitlines()
        if line.startswith("Reserved")
    )
    assert "50.0 MB by CUDA's allocator in 4 steps, emulated" in line
    assert "8.0 MB of it not allocated at that peak (largest free blocks 5.0 MB, 2.0 MB)" in line
    assert "expandable_segments:True lowers it by 6.0 MB to 44.0 MB" in line
    assert "Reserved" not in layered_report().summary()


def test_the_page_has_a_table_of_the_settings():
    """With what each changes, and which is too much for the device."""
    page = with_reserved(reserved(EXPANDABLE, SPLIT)).to_html()
    assert "torch&#39;s defaults" in page
    assert "<td>\u22126.0 MB</td>" in page
    assert "<td>+20.0 MB</td>" in page
    assert "<td>too much</td>" in page
    assert 'id="reserved"' not in layered_report().to_html()


def test_a_budget_of_it_decides_whether_the_plan_is_within():
    """Beside that of what is allocated."""
    within = with_reserved(reserved(budget=51 * MB))
    assert within.is_within_budget
    assert "reserved 50.0 MB (budget" in within.summary()
    assert "within the 51.0 MB asked for" in within.summary()
    above = with_reserved(reserved(budget=49 * MB))
    assert not above.is_within_budget
    assert "above the 49.0 MB asked for" in above.summary()


def test_json_keeps_it():
    """All cases."""
    report = with_reserved(reserved(EXPANDABLE, SPLIT, budget=51 * MB))
    assert Report.from_json(report.to_json()) == report


def test_the_first_case_is_the_default():
    """Else nothing could be held against it."""
    with pytest.raises(ReportError, match="first case"):
        ReservedMemory((EXPANDABLE,), 0, (), 4, 0)
