"""What the benchmark's page makes of rows, and which budgets are taken from others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "docs"))

import benchmark_page
import benchmark_plot
import benchmarks

MODEL = "bert"
MIB = 1 << 20


def row(variant: str, peak_mib: float, time_ratio: float, **more: Any) -> dict[str, Any]:
    """Of a step that ran under Inductor."""
    key = f"{MODEL}/inductor/{variant}"
    return {
        "key": key,
        "model": MODEL,
        "compiler": "inductor",
        "variant": variant,
        "status": "ok",
        "setting": None,
        "peak_nbytes": int(peak_mib * MIB),
        "time_ratio": time_ratio,
        **more,
    }


PLAIN, CHECKPOINT = row("plain", 100, 0.5), row("checkpoint", 50, 0.8)
OURS = row("autoremat", 50, 0.6, key=f"{MODEL}/inductor/autoremat/at checkpoint")
OURS |= {"beside": CHECKPOINT["key"], "predicted_time_us": 3.0, "baseline_time_us": 2.0}
SMALLEST = row("autoremat", 25, 1.0)


def test_our_time_is_held_against_the_one_whose_peak_we_were_given():
    """Not against the fastest, nor where there is none."""
    rows = {r["key"]: r for r in (PLAIN, CHECKPOINT)}
    assert benchmark_page.over_other(OURS, rows) == pytest.approx(0.6 / 0.8)
    assert benchmark_page.over_other(SMALLEST, rows) is None
    assert benchmark_page.budget_name(OURS, rows.values()) == (
        "as torch.compile + per-layer checkpoint"
    )


def test_what_was_foretold_is_held_against_torchs_own_step():
    """One and a half times as long was foretold, and 1.2 times was measured."""
    assert benchmark_page.time_error(OURS, [PLAIN]) == pytest.approx(100 * (1.5 / 1.2 - 1))
    assert benchmark_page.time_error(OURS, [CHECKPOINT]) is None


def test_what_generated_code_foretells_is_a_figure_of_its_own():
    """Of those points alone where it was noted."""
    by_code = {**OURS, "code_times_us": [4.0, 5.0]}
    error = benchmark_page.time_error(by_code, [PLAIN], benchmark_page.code_times)
    assert error == pytest.approx(100 * (1.25 / 1.2 - 1))
    assert benchmark_page.time_error(OURS, [PLAIN], benchmark_page.code_times) is None
    page = benchmark_page.foretold([PLAIN, CHECKPOINT, by_code])
    assert "| inductor, by generated code |  |  |  | 1 | 4.17 % | 1 |  |  |  |" in page
    assert "generated code" not in benchmark_page.foretold([PLAIN, CHECKPOINT, OURS])


def test_orders_are_compared_by_ranks():
    """Of equal ones neither is the first; where all are equal there is no order."""
    assert benchmark_page.rank_correlation([(1.0, 10.0), (2.0, 11.0), (9.0, 99.0)]) == 1.0
    assert benchmark_page.rank_correlation([(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]) == -1.0
    tied = benchmark_page.rank_correlation([(1.0, 1.0), (2.0, 2.0), (2.0, 3.0)])
    assert tied == pytest.approx(3**0.5 / 2)
    assert benchmark_page.rank_correlation([(1.0, 1.0), (1.0, 2.0)]) is None


def test_pairs_that_are_measured_alike_have_no_order():
    """Of the others it is counted how many come as foretold; as one is not the other's order."""
    points = [(1.0, 1.0), (1.02, 0.9), (1.1, 0.95), (1.2, 0.95)]
    assert benchmark_page.in_order(points) == [False, False, True, True, False]


def test_the_page_says_whether_the_foretold_order_is_the_measured_one():
    """In the median over models with enough points."""
    points = [(0.6, 1.2), (0.7, 1.3), (0.8, 1.5), (0.9, 1.4)]
    ours = [
        row("autoremat", 50, measured, predicted_time_us=told, baseline_time_us=1.0)
        for measured, told in points
    ]
    assert "| 0.80 | 0 of 1 models | 5 of 6 |" in benchmark_page.foretold([PLAIN, *ours])
    assert "|  |  | 3 of 3 |" in benchmark_page.foretold([PLAIN, *ours[:3]])


def test_the_summary_names_both_smallest_peaks():
    """And the geometric mean over models."""
    text = benchmark_page.beside_others([PLAIN, CHECKPOINT, OURS, SMALLEST], [MODEL, "mlp"])
    assert f"| {MODEL} | 25.0 | 50.0 | 0.50 | 0.75 | 0.75 |" in text
    assert "| geometric mean |  |  | 0.50 | 0.75 | 0.75 |" in text
    assert benchmark_page.beside_others([PLAIN], [MODEL]) == ""


def test_peaks_that_are_alike_are_one_budget():
    """The lowest of them, so that none of them is above it; what did not run is none."""
    alike = [row("torch budget", peak, 1.0) for peak in (50.2, 50.0, 75.0)]
    crashed = {"status": "crash"}
    found = [r["peak_nbytes"] / MIB for r in benchmarks.different([*alike, crashed, PLAIN])]
    assert found == [50.0, 75.0, 100.0]


def test_the_picture_has_a_dot_for_each_point_of_ours(tmp_path: Path) -> None:
    """Peaks in MiB above what is resident, and times over those of the step without a plan."""
    ours = OURS | {"predicted_peak_nbytes": 51 * MIB, "resident_nbytes": 0}
    rows = [PLAIN, CHECKPOINT, ours]
    assert benchmark_plot.peaks_of(rows) == [(50.0, 51.0)]
    ((measured, predicted),) = benchmark_plot.times_of(rows)
    assert (measured, predicted) == pytest.approx((1.2, 1.5))
    benchmark_plot.draw(rows, tmp_path / "one.svg")
    benchmark_plot.draw(rows, tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_the_page_says_how_far_off_predictions_are() -> None:
    """The median, and how many are within a tenth."""
    ours = OURS | {"predicted_peak_nbytes": 51 * MIB, "resident_nbytes": 0}
    text = benchmark_page.foretold([PLAIN, CHECKPOINT, ours])
    assert "| inductor | 1 | 2.00 % | 1 | 1 | 25.00 % | 0 |" in text
