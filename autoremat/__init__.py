"""autoremat: a training step that stays within a memory budget, planned automatically.

    model = autoremat.optimize(model, budget="40GB")     # and train as before

The public names are loaded on first use, so that reading a report needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoremat.api import Budget as Budget
    from autoremat.api import optimize as optimize
    from autoremat.api import report as report
    from autoremat.api import save_plan as save_plan
    from autoremat.comparison import Comparison as Comparison
    from autoremat.comparison import compare as compare
    from autoremat.errors import FallbackError as FallbackError
    from autoremat.errors import FallbackWarning as FallbackWarning
    from autoremat.errors import InfeasibleBudget as InfeasibleBudget
    from autoremat.errors import OverBudget as OverBudget
    from autoremat.errors import OverBudgetWarning as OverBudgetWarning
    from autoremat.errors import PlanMismatch as PlanMismatch
    from autoremat.errors import RankError as RankError
    from autoremat.errors import SizeError as SizeError
    from autoremat.errors import SteeringError as SteeringError
    from autoremat.memory.meter import measure_peak as measure_peak
    from autoremat.memory.meter import resident_nbytes as resident_nbytes
    from autoremat.offline import plan as plan
    from autoremat.reporting import Report as Report
    from autoremat.selective import SelectivePolicy as SelectivePolicy
    from autoremat.selective import selective_checkpoints as selective_checkpoints
    from autoremat.setup.asked import TrainingSetup as TrainingSetup
    from autoremat.sizing.fit import fit as fit
    from autoremat.sizing.model import Fit as Fit
    from autoremat.verification.whole_step import Verification as Verification
    from autoremat.verification.whole_step import verify as verify

__version__ = "0.1.0"

_HOME = {
    "Budget": "autoremat.api",
    "Comparison": "autoremat.comparison",
    "FallbackError": "autoremat.errors",
    "FallbackWarning": "autoremat.errors",
    "Fit": "autoremat.sizing.model",
    "InfeasibleBudget": "autoremat.errors",
    "OverBudget": "autoremat.errors",
    "OverBudgetWarning": "autoremat.errors",
    "PlanMismatch": "autoremat.errors",
    "RankError": "autoremat.errors",
    "Report": "autoremat.reporting",
    "SelectivePolicy": "autoremat.selective",
    "SizeError": "autoremat.errors",
    "SteeringError": "autoremat.errors",
    "TrainingSetup": "autoremat.setup.asked",
    "Verification": "autoremat.verification.whole_step",
    "compare": "autoremat.comparison",
    "fit": "autoremat.sizing.fit",
    "measure_peak": "autoremat.memory.meter",
    "optimize": "autoremat.api",
    "plan": "autoremat.offline",
    "report": "autoremat.api",
    "resident_nbytes": "autoremat.memory.meter",
    "save_plan": "autoremat.api",
    "selective_checkpoints": "autoremat.selective",
    "verify": "autoremat.verification.whole_step",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autoremat' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
