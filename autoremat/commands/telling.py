"""What a command says while it runs: warnings of ours as sentences, one object at the end.

Enters: a block of code, a document. Leaves: lines on stderr, JSON on stdout.
"""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TextIO

from autoremat.errors import FallbackWarning, InfeasibleBudget, OverBudgetWarning


def tell(message: str, told: list[str]) -> None:
    """One sentence on stderr, kept in `told` for the document."""
    told.append(message)
    print(f"autoremat: {message}", file=sys.stderr)


@contextmanager
def warnings_told(told: list[str]) -> Iterator[None]:
    """Ours as one sentence on stderr, kept in `told`; others as Python shows them."""
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, FallbackWarning | OverBudgetWarning):
                tell(str(message), told)
            else:
                others(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        for ours in (FallbackWarning, OverBudgetWarning):
            warnings.simplefilter("always", ours)
        yield


def print_json(document: dict[str, Any], told: list[str], began: float) -> None:
    """One object with warnings and seconds; a figure that is not finite is null.

    Args:
        document: what the command found.
        told: warnings.
        began: `time.monotonic()` at the command's start.
    """
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in document.items()
    }
    finite |= {"warnings": told, "seconds": time.monotonic() - began}
    print(json.dumps(finite, allow_nan=False))


def refusal_document(error: InfeasibleBudget) -> dict[str, Any]:
    """What a program can do with a budget that no plan fits."""
    return {
        "status": "infeasible",
        "message": str(error),
        "budget": error.budget_nbytes,
        "smallest_peak": error.smallest_peak_nbytes,
        "floor": error.floor_nbytes,
        "resident": error.resident_nbytes,
        "resident_parts": asdict(error.resident),
    }
