"""The leanest plan that was ever named of a problem, so that its budget is accepted when asked for.

Enters: a problem and the plan that an infeasible budget was refused with. Leaves: that plan, in
this process and in later ones. How far a search gets within its time limit depends on what else
the machine does; a budget that `InfeasibleBudget` names must be accepted all the same. Measured
times are no part of a problem's key: they vary, and a schedule is valid whatever they are. A plan
that cannot be stored or read is not remembered; nothing else depends on it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from autoremat_solver import Plan, Problem, check

from autoremat.cost.cache import default_cache_path


@dataclass(frozen=True)
class LeanPlan:
    """A plan and the budget that it was named for.

    Attributes:
        plan: its steps.
        peak_nbytes: its real peak, as it was read when the plan was found.
    """

    plan: Plan
    peak_nbytes: int


_known: dict[str, LeanPlan] = {}


def recall(problem: Problem) -> LeanPlan | None:
    """The leanest plan remembered of this problem; None if there is none that is valid."""
    key = _key(problem)
    if key not in _known:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            found = json.loads(_path(key).read_text(encoding="utf-8"))
            plan = Plan.of(found["schedule"])
            _known[key] = LeanPlan(plan, int(found["peak_nbytes"]))
    known = _known.get(key)
    return known if known is not None and not check(problem, known.plan) else None


def remember(problem: Problem, plan: Plan, peak_nbytes: int) -> None:
    """Keep a plan and its real peak for `recall`."""
    key, new = _key(problem), LeanPlan(plan, peak_nbytes)
    if _known.get(key) == new:
        return
    _known[key] = new
    path = _path(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(
            json.dumps({"schedule": plan.schedule, "peak_nbytes": peak_nbytes}), encoding="utf-8"
        )
        temporary.replace(path)


def _key(problem: Problem) -> str:
    """A digest of everything but times."""
    parts = [
        [[v.name, v.nbytes, v.must_save, v.must_recompute] for v in problem.values],
        [
            [op.name, op.inputs, op.outputs, op.workspace_nbytes, op.phase.value, op.recomputable]
            for op in problem.ops
        ],
        problem.outputs,
        problem.resident_nbytes,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _path(key: str) -> Path:
    return default_cache_path().parent / "lean_plans" / f"{key}.json"
