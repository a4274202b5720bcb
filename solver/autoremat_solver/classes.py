"""Values that play the same part in equal blocks of a step.

Enters: an `Indexed` problem. Leaves: classes of values. Two operations are alike if their times,
sizes and phases are equal, and those of what they read and of who reads what they make, and so on
for `ROUNDS` rounds of colour refinement; a value's class is its maker's and its place among the
outputs. Equal layers have equal cost keys, so their measured times are equal, not only near.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from autoremat_solver.indexed import Indexed

ROUNDS = 4


def classes_of(indexed: Indexed) -> list[list[int]]:
    """Candidates by class, for classes of two or more."""
    values, ops = indexed.problem.values, indexed.problem.ops
    colour = _numbered(
        [
            (
                op.time_us,
                op.workspace_nbytes,
                op.phase,
                op.recomputable,
                tuple(
                    (values[v].nbytes, values[v].save_us, indexed.pinned[v], indexed.barred[v])
                    for v in indexed.outputs[number]
                ),
            )
            for number, op in enumerate(ops)
        ]
    )
    for _ in range(ROUNDS):
        colour = _numbered([_around(indexed, colour, op) for op in range(len(ops))])
    found: dict[Hashable, list[int]] = {}
    for v in indexed.candidates:
        maker = indexed.producer[v]
        found.setdefault((colour[maker], indexed.outputs[maker].index(v)), []).append(v)
    return [members for members in found.values() if len(members) > 1]


def _around(indexed: Indexed, colour: list[int], op: int) -> Hashable:
    """An operation's colour with those of the operations next to it."""
    reads = tuple(
        (colour[maker], indexed.outputs[maker].index(v))
        for v in indexed.inputs[op]
        for maker in (indexed.producer[v],)
    )
    readers = tuple(
        tuple(sorted(colour[r] for r in indexed.readers[v])) for v in indexed.outputs[op]
    )
    return colour[op], reads, readers


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    number: dict[Hashable, int] = {}
    return [number.setdefault(key, len(number)) for key in keys]
