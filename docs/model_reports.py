"""Write the reports of eleven models, without times: to hold two checkouts against each other.

    python docs/model_reports.py before.json      # in one checkout
    python docs/model_reports.py after.json       # in the other
    diff before.json after.json

Enters: the models of `tests/reporting/test_report_agrees.py`, each with room, at its smallest peak
and half way, op by op. Leaves: their reports, without line numbers and times.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import autoremat
from tests.reporting.test_report_agrees import CASES, WITH_ROOM

_TIMES = re.compile(r"[\d.]+ (us|ms|s)\b")
_LINES = re.compile(r"(\.py):\d+")


def reports(name: str) -> dict[str, Any]:
    """The three reports of a model."""

    def planned(budget_nbytes: int) -> autoremat.Report:
        torch.compiler.reset()
        torch.manual_seed(0)
        model, inputs = CASES[name]()
        return autoremat.plan(
            model.train(),
            *inputs,
            budget=budget_nbytes,
            compiler="eager",
            time_limit=3.0,
            verbose=False,
        )

    roomy = planned(WITH_ROOM)
    try:
        tight = planned(roomy.resident_nbytes + 1)
    except autoremat.InfeasibleBudget as refusal:
        tight = planned(refusal.smallest_peak_nbytes)
    half = planned((roomy.predicted_peak_nbytes + tight.predicted_peak_nbytes) // 2)
    found = {"with room": roomy, "at its smallest peak": tight, "half way": half}
    return {kind: timeless(json.loads(report.to_json())) for kind, report in found.items()}


def timeless(value: Any) -> Any:
    """A document without what differs from run to run."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not k.endswith(("_us", "seconds", "gap"))}
        return {key: timeless(inner) for key, inner in kept.items()}
    if isinstance(value, list):
        return [timeless(inner) for inner in value]
    if isinstance(value, str):
        return _LINES.sub(r"\1", _TIMES.sub("a time", value))
    return value


def main() -> None:
    """Write the file that the command line names."""
    warnings.simplefilter("ignore")
    documents = {name: reports(name) for name in CASES}
    Path(sys.argv[1]).write_text(json.dumps(documents, indent=1, sort_keys=True), encoding="utf-8")


if __name__ == "__main__":
    main()
