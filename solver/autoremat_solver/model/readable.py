"""Which instances of a value the backward may read, and what that asks of the operations.

Enters: an `Indexed` problem. Leaves: a `Reading`, and a `ProblemError` where the backward reads a
value of which it may read no instance at all. Graphs without phases have no backward: there
must_save and must_recompute mean nothing.

A must_recompute value that the backward reads has to be made there. If its EITHER operation runs
once, or the value is an output (reads of outputs see the first instance), that operation may not
run in the forward at all, and so neither may an EITHER operation that reads what it makes. Where
no instance can be read, whatever reads the value runs in the forward only. Of a value that nothing
reads, must_recompute asks nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoremat_solver.problem import Phase, ProblemError

if TYPE_CHECKING:
    from autoremat_solver.model.indexed import Indexed


@dataclass(frozen=True)
class Reading:
    """What the backward may read.

    Attributes:
        late: EITHER operations that may not run in the forward.
        rerunnable: per operation, whether a second run is allowed and finds its inputs. A second
            run of an operation that makes a must_save value would hide the instance that later
            reads must see.
        forced: per value, whether the backward can read no other instance than the forward's.
        barred: per value, whether the backward must not read the forward's instance.
        unreadable: per value, whether it can read none.
    """

    late: frozenset[int]
    rerunnable: list[bool]
    forced: list[bool]
    barred: list[bool]
    unreadable: list[bool]


def reading_of(indexed: Indexed) -> Reading:
    """Follow what may be read through the operations, in their order."""
    values, ops = indexed.problem.values, indexed.problem.ops
    late = _late(indexed)
    reading = Reading(
        late=late,
        rerunnable=[False] * len(ops),
        forced=[False] * len(values),
        barred=[
            (value.must_recompute and bool(indexed.readers[v])) or indexed.producer[v] in late
            for v, value in enumerate(values)
        ],
        unreadable=[False] * len(values),
    )
    for number, op in enumerate(ops):
        finds = not any(reading.unreadable[v] for v in indexed.inputs[number])
        once = not op.recomputable or any(values[v].must_save for v in indexed.outputs[number])
        backward, either = op.phase is Phase.BACKWARD, op.phase is Phase.EITHER
        reading.rerunnable[number] = not backward and not once and finds
        for v in indexed.outputs[number] if op.phase is not Phase.ANY and not backward else ():
            saved = any(values[w].must_save for w in indexed.outputs[number])
            in_forward = (saved or not finds) if either else not reading.rerunnable[number]
            reading.forced[v] = number not in late and (values[v].must_save or in_forward)
            again = _can_be_late(indexed, v, late) and finds and not values[v].must_save
            reading.unreadable[v] = reading.barred[v] and not (again and not reading.forced[v])
    return reading


def _can_be_late(indexed: Indexed, v: int, late: frozenset[int]) -> bool:
    """Whether its operation and its being an output let reads see an instance of the backward."""
    op = indexed.producer[v]
    if op in late:
        return True
    return indexed.problem.ops[op].recomputable and not indexed.pinned[v]


def _late(indexed: Indexed) -> frozenset[int]:
    """EITHER operations that may not run in the forward."""
    values = indexed.problem.values
    stack = [v for op in indexed.backward_ops for v in indexed.inputs[op]]
    needed: set[int] = set()
    late: set[int] = set()
    while stack:
        v = stack.pop()
        op = indexed.producer[v]
        if not (values[v].must_recompute or op in late) or v in needed:
            continue
        needed.add(v)
        stack.extend(indexed.inputs[op])
        is_free = indexed.problem.ops[op].recomputable and not indexed.pinned[v]
        if indexed.phase[op] is not Phase.EITHER or (is_free and op not in late):
            continue
        for reader in _either_from(indexed, op) - late:
            late.add(reader)
            stack.extend(indexed.inputs[reader])
    return frozenset(late)


def _either_from(indexed: Indexed, op: int) -> set[int]:
    """An EITHER operation and all that read, directly or not, what it makes."""
    found, stack = {op}, [op]
    while stack:
        for v in indexed.outputs[stack.pop()]:
            for reader in indexed.readers[v]:
                if indexed.phase[reader] is Phase.EITHER and reader not in found:
                    found.add(reader)
                    stack.append(reader)
    return found


def require_consistent(indexed: Indexed) -> None:
    """Raise unless the backward may read some instance of every value that it reads.

    Raises:
        ProblemError: if it may not: a value must be recomputed, but its operation, or one that it
            needs, can run only in the forward, or only once, or before recompute can begin.
    """
    reading = indexed.reading
    at_once = frozenset(indexed.demands[0]) if indexed.demands else frozenset()
    for v in indexed.demanded:
        value = indexed.problem.values[v]
        op = indexed.problem.ops[indexed.producer[v]]
        if v in at_once and reading.barred[v]:
            first = indexed.problem.ops[indexed.backward_ops[0]].name
            raise ProblemError(
                f"Value {value.name!r} must be recomputed, but the first backward operation "
                f"{first!r} reads it: recompute begins after that operation. Drop must_recompute."
            )
        if not reading.unreadable[v]:
            continue
        if indexed.pinned[v] and value.must_recompute:
            raise ProblemError(
                f"Value {value.name!r} must be recomputed, but it is an output: reads of outputs "
                "see the first instance. Drop must_recompute."
            )
        raise ProblemError(
            f"Value {value.name!r} must be recomputed for the backward, but its operation "
            f"{op.name!r} may not run there, or may run only once, or reads what cannot be read "
            "there. Make it recomputable or drop must_recompute."
        )
