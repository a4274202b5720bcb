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
from pathlib import Path

from autoremat_solver import Plan, Problem, check

from autoremat.cost_cache import default_cache_path

_known: dict[str, Plan] = {}


def recall(problem: Problem) -> Plan | None:
    """The leanest plan remembered of this problem; None if there is none that is valid."""
    key = _key(problem)
    if key not in _known:
        with contextlib.suppress(OSError, ValueError, TypeError):
            schedule = json.loads(_path(key).read_text(encoding="utf-8"))
            _known[key] = Plan(tuple(schedule))
    plan = _known.get(key)
    return plan if plan is not None and not check(problem, plan) else None


def remember(problem: Problem, plan: Plan) -> None:
    """Keep a plan for `recall`."""
    key = _key(problem)
    if _known.get(key) == plan:
        return
    _known[key] = plan
    path = _path(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(plan.schedule), encoding="utf-8")
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
