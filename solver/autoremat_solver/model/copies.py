"""A problem whose values may wait on the host: copies as operations beside those that run.

Enters: an `Indexed`. Leaves: an `Indexed` of the same operations and values, and for each value
one more value, its copy on the host, and three more operations:

    OFFLOAD v   reads v            makes v on the host
    RELEASE v   reads v on the host and v: it is needed until the copy has arrived
    RELOAD v    reads v on the host, makes v

So the instances of values in both memories follow from the rules for operations alone. What the
copies take is no time of these operations, since the copy engines work beside the computing; what
computing takes for a copy (`Link.computing_us`) is time of the one that begins it.
"""

from __future__ import annotations

from dataclasses import replace

from autoremat_solver.model.indexed import Indexed
from autoremat_solver.plan import Plan, StepKind

COPY_KINDS = (StepKind.OFFLOAD, StepKind.RELEASE, StepKind.RELOAD)


def with_copies(indexed: Indexed) -> Indexed:
    """The problem with a copy on the host of every value; see the module for its operations."""
    values, link = range(len(indexed.nbytes)), indexed.problem.link
    on_host = len(values)
    copied_nbytes = [n if link is None else link.on_host_nbytes(n) for n in indexed.nbytes]
    inputs: list[tuple[int, ...]] = [
        pair for v in values for pair in ((v,), (on_host + v, v), (on_host + v,))
    ]
    outputs: list[tuple[int, ...]] = [one for v in values for one in ((on_host + v,), (), (v,))]
    count = len(inputs)
    return replace(
        indexed,
        inputs=indexed.inputs + inputs,
        outputs=indexed.outputs + outputs,
        time_us=indexed.time_us + [_computing_us(indexed, number) for number in range(count)],
        workspace_nbytes=indexed.workspace_nbytes + [0] * count,
        nbytes=indexed.nbytes + copied_nbytes,
        pinned=indexed.pinned + [False] * on_host,
        overwrites=indexed.overwrites + [()] * count,
        _derived={},
    )


def copy_of(indexed: Indexed, op: int) -> tuple[StepKind, int] | None:
    """What a copying operation does and to which value; None if it is one that runs.

    Args:
        indexed: the problem without copies.
        op: the number of an operation of the problem with them.
    """
    number = op - len(indexed.time_us)
    return None if number < 0 else (COPY_KINDS[number % 3], number // 3)


def computing_us(indexed: Indexed, op: int) -> float:
    """What computing takes for an operation of the problem with copies.

    Args:
        indexed: the problem without copies.
        op: the number of the operation.
    """
    number = op - len(indexed.time_us)
    return indexed.time_us[op] if number < 0 else _computing_us(indexed, number)


def _computing_us(indexed: Indexed, number: int) -> float:
    """The same of the number-th copying operation."""
    link, kind = indexed.problem.link, COPY_KINDS[number % 3]
    if link is None or kind is StepKind.RELEASE:
        return 0.0
    nbytes = indexed.nbytes[number // 3]
    copy_us = link.out_us(nbytes) if kind is StepKind.OFFLOAD else link.in_us(nbytes)
    return link.computing_us(copy_us)


def numbers_with_copies(indexed: Indexed, plan: Plan) -> list[int]:
    """Operation numbers of all steps, in the problem with copies.

    Args:
        indexed: the problem without copies.
        plan: a plan of it.

    Raises:
        KeyError: if a step names an unknown operation or value.
        ValueError: if a step is a first run of what ran before, or a recompute of what did not.
    """
    runs = iter(indexed.numbers(plan))
    value = {value.name: v for v, value in enumerate(indexed.problem.values)}
    count = len(indexed.time_us)
    return [
        next(runs) if step.is_run else count + 3 * value[step.target] + COPY_KINDS.index(step.kind)
        for step in plan.steps
    ]
