"""Plans which values of a training step to save and which to recompute, under a memory budget.

Enters: a `Problem` (the operations of one step with bytes and times). Leaves: a `Solution`
whose `Plan` is a sequence of steps: first runs and recomputes. Nothing here knows torch.
"""

from autoremat_solver.certificate import CertificateError, CertificateWarning
from autoremat_solver.check import check
from autoremat_solver.node_link import read_problem
from autoremat_solver.offload.solve import OffloadSolver
from autoremat_solver.plan import Plan, Solution, Status, Step, StepKind, Timeline
from autoremat_solver.problem import Link, Op, Phase, Problem, ProblemError, Region, Value
from autoremat_solver.regions import unrolled, unrolled_plan
from autoremat_solver.simulate import simulate
from autoremat_solver.solve import Solver, solve

__all__ = [
    "CertificateError",
    "CertificateWarning",
    "Link",
    "OffloadSolver",
    "Op",
    "Phase",
    "Plan",
    "Problem",
    "ProblemError",
    "Region",
    "Solution",
    "Solver",
    "Status",
    "Step",
    "StepKind",
    "Timeline",
    "Value",
    "check",
    "read_problem",
    "simulate",
    "solve",
    "unrolled",
    "unrolled_plan",
]
