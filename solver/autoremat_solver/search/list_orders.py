"""Orders of a graph without phases that hold little, made run by run.

Enters: a graph and an effort. Leaves: topological orders without reruns. Each next operation is,
of those whose inputs are made, the one that leaves the fewest bytes live; bytes that others still
read may count as freed in part, and sizes may be drawn at random. Seeded, limited by the effort.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from autoremat_solver.effort import Effort
from autoremat_solver.model.indexed import Indexed

PARTS = (0.0, 0.25, 0.5, 1.0)  # of a value's bytes that its readers free together before the last
ORDERS = 8
NOISE = 0.25


def list_orders(indexed: Indexed, effort: Effort, *, seed: int = 0) -> Iterator[list[int]]:
    """The given order, then others: first without chance, then with it."""
    yield list(range(len(indexed.inputs)))
    chance = random.Random(seed)
    for number in range(ORDERS):
        if effort.is_spent:
            return
        noise = 0.0 if number < len(PARTS) else NOISE
        yield _order(indexed, PARTS[number % len(PARTS)], noise, chance, effort)


def _order(
    indexed: Indexed, part: float, noise: float, chance: random.Random, effort: Effort
) -> list[int]:
    readers_left = [len(readers) for readers in indexed.readers]
    missing = [len(values) for values in indexed.inputs]
    ready = [op for op, count in enumerate(missing) if count == 0]
    order: list[int] = []
    while ready:
        effort.simulated(len(ready))
        keys = []
        for op in ready:
            growth = _growth(indexed, op, part, readers_left)
            keys.append((growth * (1 + noise * chance.uniform(-1, 1)) if noise else growth, op))
        op = min(keys)[1]
        ready.remove(op)
        order.append(op)
        for v in indexed.inputs[op]:
            readers_left[v] -= 1
        for v in indexed.outputs[op]:
            for reader in indexed.readers[v]:
                missing[reader] -= 1
                if missing[reader] == 0:
                    ready.append(reader)
    return order


def _growth(indexed: Indexed, op: int, part: float, readers_left: list[int]) -> float:
    """Bytes that an operation leaves live, less those that it frees."""
    growth = 0.0
    for v in indexed.outputs[op]:
        if readers_left[v] or indexed.pinned[v]:
            growth += indexed.nbytes[v]
    for v in indexed.inputs[op]:
        if not indexed.pinned[v]:
            freed = 1.0 if readers_left[v] == 1 else part / readers_left[v]
            growth -= freed * indexed.nbytes[v]
    return growth
