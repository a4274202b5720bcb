"""What users have without a solver, as plans of a graph: candidates on the same footing as ours.

Enters: a stated graph. Leaves: plans by name. Guarantees: what torch's partitioner would save at a
setting is saved; how it is written out, drawn again and compiled is ours, as for any plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress

from autoremat_solver import Plan, ProblemError, simulate
from autoremat_solver.policies import per_segment, save_all_but

from autoremat import _torch
from autoremat.graph.joint_graph import copy_module
from autoremat.planning.torch_plan import handed_over
from autoremat.problem.segments import products, segments
from autoremat.problem.subject import Subject

BY_LAYER, SELECTIVE = "every-layer", "every layer but its products"
TORCH_BUDGETS = (0.7, 0.5, 0.3, 0.1)  # settings of torch's `activation_memory_budget`


def layer_by_layer(subject: Subject) -> Plan | None:
    """Every layer made again, as people do by hand; None without layers.

    It is simulated to take more than the leanest plans. The code that is generated for it may take
    less: it keeps of a loss what the backward can make again within the kernels that read it.
    """
    return _by_layer(subject, frozenset())


def but_products(subject: Subject) -> Plan | None:
    """Every layer made again but for its matrix products, convolutions and attention."""
    return _by_layer(subject, products(subject.joint, subject.lowered.storages))


def as_torch(subject: Subject, budget: float) -> Plan:
    """What torch saves at a setting of its budget, and once more what its backward lacks."""
    joint, lowered = subject.joint, subject.lowered
    _, backward = _torch.min_cut(
        copy_module(joint.module), num_fwd_outputs=joint.num_fwd_outputs, budget=budget
    )
    kept = handed_over(joint, lowered.storages, backward)
    return save_all_but(lowered.problem, {v.name for v in lowered.problem.values} - kept)


def peers(subject: Subject) -> Iterator[tuple[str, Plan]]:
    """What a user might have done by hand, the cheapest to find first; each plan once."""
    seen: set[Plan] = set()
    for name, plan in itertools.chain(_by_hand(subject), _torchs(subject)):
        if plan is not None and plan not in seen:
            seen.add(plan)
            yield name, plan


def faster_peers(
    subject: Subject,
    budget_nbytes: int,
    time_us: float,
    *,
    slack: float = 1.0,
    is_late: Callable[[], bool] = lambda: False,
) -> list[tuple[str, Plan]]:
    """Those that are simulated to take less time, and about the budget or less; the fastest first.

    Args:
        subject: the graph.
        budget_nbytes: of the whole step.
        time_us: to beat.
        slack: times the budget above what is resident, that a plan may be simulated to take.
        is_late: asked after each, whether the others are left out.
    """
    problem = subject.lowered.problem
    resident = problem.resident_nbytes
    found = []
    for name, plan in peers(subject):
        timeline = simulate(problem, plan)
        above = timeline.peak_nbytes - resident
        if timeline.time_us < time_us and above <= slack * (budget_nbytes - resident):
            found.append((timeline.time_us, name, plan))
        if is_late():
            break
    return [(name, plan) for _, name, plan in sorted(found, key=lambda one: one[0])]


def _by_hand(subject: Subject) -> Iterator[tuple[str, Plan | None]]:
    yield BY_LAYER, layer_by_layer(subject)
    yield SELECTIVE, but_products(subject)


def _torchs(subject: Subject) -> Iterator[tuple[str, Plan | None]]:
    for budget in TORCH_BUDGETS:
        plan = None
        with suppress(Exception):  # what torch cannot do at a setting is no reason to fail
            plan = as_torch(subject, budget)
        yield f"torch, budget {budget:g}", plan


def _by_layer(subject: Subject, kept: frozenset[str]) -> Plan | None:
    segment_of = segments(subject.joint, subject.lowered, layers=1)
    with suppress(ProblemError):  # some values may neither be saved nor made again
        return per_segment(subject.lowered.problem, segment_of, kept) if segment_of else None
    return None
