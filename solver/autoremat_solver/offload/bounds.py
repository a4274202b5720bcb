"""What no plan can do better, if values may also wait on the host.

Enters: a problem. Leaves: a time and a peak that are proven for every plan that `check` accepts,
with copies or without, whatever the link and the host. They are weaker than the bounds of `bounds`,
which hold for plans without copies only.
"""

from __future__ import annotations

import math

from autoremat_solver.model.indexed import Indexed
from autoremat_solver.problem import Phase


def needed_operations(indexed: Indexed) -> list[int]:
    """Operations that every plan runs at least once, ascending."""
    needed: set[int] = set()
    stack = [op for op, phase in enumerate(indexed.phase) if phase is not Phase.EITHER]
    stack += [indexed.producer[v] for v, pinned in enumerate(indexed.pinned) if pinned]
    while stack:
        op = stack.pop()
        if op not in needed:
            needed.add(op)
            stack += [indexed.producer[v] for v in indexed.inputs[op]]
    return sorted(needed)


def least_us(indexed: Indexed) -> float:
    """Each operation that has to run takes its time once, and computing is one thing at a time."""
    return math.fsum(indexed.time_us[op] for op in needed_operations(indexed))


def least_peak_nbytes(indexed: Indexed) -> int:
    """What an operation needs while it runs, and the outputs that have to be there by then.

    FORWARD and BACKWARD operations run in their order, so the outputs of those before are there.
    """
    problem, order = indexed.problem, (Phase.FORWARD, Phase.BACKWARD)
    made: set[int] = set()
    least_nbytes = 0  # of a plan without steps
    for op in needed_operations(indexed):
        own = {*indexed.inputs[op], *indexed.outputs[op]}
        kept = made - own if indexed.phase[op] in order else set()
        nbytes = sum(indexed.nbytes[v] for v in own | kept) + indexed.least_extra_nbytes[op]
        least_nbytes = max(least_nbytes, problem.resident_nbytes + nbytes)
        if indexed.phase[op] in order:
            made.update(v for v in indexed.outputs[op] if indexed.pinned[v])
    return least_nbytes
