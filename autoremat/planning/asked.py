"""The plan that the user asked for: that of a strategy, or a stored one.

Enters: a `Steering`, and one lowered graph after the other. Leaves: for a graph the choice that
follows from it, or None where the planner is to search; and what a file keeps of a choice.
Guarantees: what cannot be done as asked raises `SteeringError`, and is never dropped.
"""

from __future__ import annotations

import torch
from autoremat_solver import Plan, check, simulate
from autoremat_solver.policies import per_segment, recompute_all, save_all_but, sqrt_segments
from torch import fx

from autoremat.ask.plan_file import StoredGraph, StoredPlan, require_same
from autoremat.ask.policy import Policy
from autoremat.ask.steering import Steering
from autoremat.errors import PlanMismatch
from autoremat.planning.choice import TORCH, Choice
from autoremat.planning.identity import fingerprint
from autoremat.planning.unsearched import choose_fixed, choose_torch
from autoremat.problem.segments import attention_cores, segments
from autoremat.problem.shell import closed, has_copies, in_texts
from autoremat.problem.subject import Subject
from autoremat.units import format_nbytes


def choose_as_asked(
    subject: Subject, steering: Steering, number: int, budget_nbytes: int, *, reads: bool
) -> Choice | None:
    """The choice that the user's policy or stored plan makes; None if the planner is to search.

    Args:
        subject: the graph.
        steering: what was asked for.
        number: how many graphs of the step were planned before this one.
        budget_nbytes: what the choice should fit.
        reads: whether peaks are read from generated code.
    """
    if steering.plan is not None:
        return _apply(subject, steering.plan, number, budget_nbytes, reads=reads)
    if not steering.policy.is_fixed:
        return None
    plan, method = policy_plan(subject, steering.policy)
    return choose_fixed(subject, plan, method, budget_nbytes, reads=reads)


def policy_plan(subject: Subject, policy: Policy) -> tuple[Plan, str]:
    """The plan of a policy, and its name with what it found in the graph."""
    problem = subject.lowered.problem
    if policy.layers:
        segment_of = segments(subject.joint, subject.lowered, policy.layers)
        count = len(set(segment_of.values()))
        return per_segment(problem, segment_of), f"{policy.name}, {count} segments"
    if policy.name == "selective-attention":
        cores = attention_cores(subject.joint, subject.lowered.storages)
        scores = frozenset[str]().union(*cores)
        return save_all_but(problem, scores), f"{policy.name}, {len(cores)} cores"
    plans = {"save-all": save_all_but, "recompute-all": recompute_all, "sqrt": sqrt_segments}
    return plans[policy.name](problem), policy.name


def choose_known(
    subject: Subject, known: StoredPlan, budget_nbytes: int, *, reads: bool
) -> Choice | None:
    """The plan of a file for a graph that it knows, where it can be applied and fits; else None."""
    nodes = fingerprint(subject.joint)
    for graph in known.graphs:
        if graph.nodes != nodes or _violation(subject, graph) or _lacks_room(subject, graph):
            continue
        choice = choose_stored(subject, graph, budget_nbytes, reads=reads)
        if choice is not None and choice.fits:
            return choice
    return None


def _apply(
    subject: Subject, stored: StoredPlan, number: int, budget_nbytes: int, *, reads: bool
) -> Choice:
    graph = require_same(stored, number, fingerprint(subject.joint), torch.__version__)
    if has_copies(graph.schedule) and subject.host is None:
        raise PlanMismatch(
            f"The plan of graph {number} lets values wait elsewhere: say where, as it was made "
            "with offload=, or plan again."
        )
    if violation := _violation(subject, graph):
        raise PlanMismatch(
            f"The plan cannot be applied to graph {number}: {violation} What may run again is not "
            "what it was when the plan was made: are dropout=, repeatable= and offload= the same, "
            "and the device? Otherwise plan again."
        )
    if lacking := _lacks_room(subject, graph):
        raise PlanMismatch(f"The plan of graph {number} {lacking}")
    choice = choose_stored(subject, graph, budget_nbytes, reads=reads)
    if choice is None:
        raise PlanMismatch(
            f"Graph {number} is the one that was planned, but written out it saves other values: "
            f"the plan was made with torch {stored.torch_version}; this is {torch.__version__}. "
            "Plan again."
        )
    return choice


def choose_stored(
    subject: Subject, graph: StoredGraph, budget_nbytes: int, *, reads: bool
) -> Choice | None:
    """A valid plan of the graph, as it was stored; None if it saves other values, written out."""
    choice: Choice | None
    if graph.is_own:
        plan = closed(subject.lowered.problem, graph.schedule)
        choice = choose_fixed(
            subject, plan, graph.method, budget_nbytes, reads=reads, in_order=graph.in_order
        )
    else:
        choice = choose_torch(subject, budget_nbytes)
    is_same = choice is not None and saved_names(choice.backward) == graph.saved
    return choice if is_same else None


def _violation(subject: Subject, stored: StoredGraph) -> str:
    """Why a plan is none of the graph any more; "" if it is one."""
    if not stored.is_own:
        return ""
    if subject.host is None and has_copies(stored.schedule):
        return "Values may not leave."
    problem = subject.lowered.problem
    wrong = check(problem, closed(problem, stored.schedule))
    return wrong[0] if wrong else ""


def _lacks_room(subject: Subject, stored: StoredGraph) -> str:
    """What a plan of the graph lets wait that the host has no room for; "" if it has."""
    host, problem = subject.host, subject.lowered.problem
    if host is None or not has_copies(stored.schedule):
        return ""
    waiting_nbytes = simulate(problem, closed(problem, stored.schedule)).host_peak_nbytes
    room_nbytes = host.free_nbytes
    if waiting_nbytes <= room_nbytes:
        return ""
    return (
        f"lets {format_nbytes(waiting_nbytes)} wait elsewhere at once, where there is room for "
        f"{format_nbytes(room_nbytes)} (offload={host.asked!r}): give it more, or plan again."
    )


def store(subject: Subject, choice: Choice) -> StoredGraph:
    """What a file keeps of a planned graph."""
    return StoredGraph(
        nodes=fingerprint(subject.joint),
        schedule=in_texts(choice.solution.plan),
        saved=saved_names(choice.backward),
        method=choice.method,
        is_own=choice.method != TORCH,
        in_order=choice.in_order,
    )


def saved_names(backward: fx.GraphModule) -> tuple[str, ...]:
    """What a backward module receives, sorted."""
    return tuple(sorted(node.name for node in backward.graph.find_nodes(op="placeholder")))
