"""autoremat: a training step that stays within a memory budget, planned automatically.

    model = autoremat.optimize(model, budget="40GB")     # and train as before

The public names are loaded on first use, so that reading a report needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoremat.api import optimize, report, save_plan
    from autoremat.comparison import Comparison, compare
    from autoremat.errors import (
        FallbackError,
        FallbackWarning,
        InfeasibleBudget,
        OverBudget,
        OverBudgetWarning,
        PlanMismatch,
        SteeringError,
    )
    from autoremat.memory.meter import measure_peak, resident_nbytes
    from autoremat.offline import plan
    from autoremat.reporting import Report
    from autoremat.verification.whole_step import Verification, verify

__version__ = "0.1.0"

_HOME = {
    "Comparison": "autoremat.comparison",
    "FallbackError": "autoremat.errors",
    "FallbackWarning": "autoremat.errors",
    "InfeasibleBudget": "autoremat.errors",
    "OverBudget": "autoremat.errors",
    "OverBudgetWarning": "autoremat.errors",
    "PlanMismatch": "autoremat.errors",
    "Report": "autoremat.reporting",
    "SteeringError": "autoremat.errors",
    "Verification": "autoremat.verification.whole_step",
    "compare": "autoremat.comparison",
    "measure_peak": "autoremat.memory.meter",
    "optimize": "autoremat.api",
    "plan": "autoremat.offline",
    "report": "autoremat.api",
    "resident_nbytes": "autoremat.memory.meter",
    "save_plan": "autoremat.api",
    "verify": "autoremat.verification.whole_step",
}

__all__ = [
    "Comparison",
    "FallbackError",
    "FallbackWarning",
    "InfeasibleBudget",
    "OverBudget",
    "OverBudgetWarning",
    "PlanMismatch",
    "Report",
    "SteeringError",
    "Verification",
    "compare",
    "measure_peak",
    "optimize",
    "plan",
    "report",
    "resident_nbytes",
    "save_plan",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autoremat' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
