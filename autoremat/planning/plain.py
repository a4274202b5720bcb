"""A graph that runs without a plan of ours: what crosses from its forward to its backward.

Enters: a stated graph. Leaves: a `Crossing`, as others count it that are beside the graph.
"""

from __future__ import annotations

from contextlib import suppress

from autoremat_solver.simulate import saved_values

from autoremat.planning.nesting import Crossing
from autoremat.planning.simulated import without_plan
from autoremat.planning.torch_own import Own, Unplanned
from autoremat.problem.subject import Subject


def plain_crossing(subject: Subject, *, reads: bool) -> Crossing:
    """What it saves or returns.

    Args:
        subject: the graph alone.
        reads: whether torch's own partition is what runs, where it is safe; else each operation
            runs once.
    """
    joint, storages = subject.joint, subject.lowered.storages
    problem = subject.lowered.problem
    own = own_partition(subject) if reads else None
    incoming = {name for node in joint.tangents for name in storages.of_node[node]}
    saved = (own.torchs.saved if own else saved_values(problem, without_plan(subject))) - incoming
    returned = {name for node in joint.fwd_outputs for name in storages.of_node[node]}
    crossing_nbytes, passed_nbytes = (
        sum(storages.nbytes.get(name, 0) for name in names - storages.resident)
        for names in (saved | returned, returned - saved)
    )
    return Crossing(crossing_nbytes, passed_nbytes)


def own_partition(subject: Subject) -> Own | None:
    """Torch's own partition; None if it is not safe, or where a report is the first to ask."""
    with suppress(Exception):  # some graphs torch parts only while it compiles them
        return Unplanned(subject).own
    return None
