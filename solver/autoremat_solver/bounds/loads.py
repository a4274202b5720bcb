"""Live bytes at one moment as rows of a linear program, and what follows as values are whole.

Enters: a `Load`. Leaves: rows that keep it within a budget, for every plan that does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoremat_solver.program.formulation import Row

NONE = -1
MOST_PARTS = 24
LEAST_OVER = 1e-4
SMALL = 100_000  # a value this often in the budget is left out: it disturbs the arithmetic

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Load:
    """Bytes that are live at one moment.

    Attributes:
        constant: live in every plan.
        terms: (bytes, plus, minus) of values: live if column `plus` is 1, or is `NONE`, and column
            `minus`, if there is one, is 0.
    """

    constant: int
    terms: list[tuple[int, int, int]]


def broken_rows(load: Load, budget: int, values: Vector, *, always: bool) -> list[Row]:
    """Rows that every plan within the budget keeps, and that a point breaks.

    Args:
        load: what is live.
        budget: bytes.
        values: the point, per column, and a 0 at the end.
        always: give the row in bytes even if the point keeps it.
    """
    row, most = _row(load, budget)
    unit = max(map(abs, row.values()), default=1.0)
    over = sum(x * values[c] for c, x in row.items()) - most
    rows: list[Row] = []
    if row and (always or over > 1e-6 * unit):
        rows.append(({c: x / unit for c, x in row.items()}, -math.inf, most / unit))
    rows += _too_large(load, budget, values)
    parts = _most_broken_parts(load, budget, values)
    if parts:
        row, most = _row(load, budget, parts)
        rows.append((row, -math.inf, most))
    return rows


def _row(load: Load, budget: int, parts: int = 0) -> tuple[dict[int, float], float]:
    """Coefficients, and the most that their sum may be.

    With parts, a value counts how many of so many equal parts of the room it exceeds: those that
    are live together exceed fewer than all, and a whole number of them.
    """
    row: dict[int, float] = {}
    room = budget - load.constant
    most = parts - 1 if parts else room
    for nbytes, plus, minus in load.terms:
        if nbytes * SMALL < budget:
            continue
        size = _parts_exceeded(nbytes, room, parts) if parts else nbytes
        if plus == NONE:
            most -= size
        else:
            row[plus] = row.get(plus, 0.0) + size
        if minus != NONE:
            row[minus] = row.get(minus, 0.0) - size
    return {c: float(x) for c, x in row.items() if x}, float(most)


def _parts_exceeded(nbytes: int, room: int, parts: int) -> int:
    if nbytes > room:
        return parts
    return (nbytes * parts - 1) // room if nbytes else 0


def _too_large(load: Load, budget: int, values: Vector) -> list[Row]:
    """No value above the room is live."""
    room = budget - load.constant
    rows: list[Row] = []
    for nbytes, plus, minus in load.terms:
        live = (1.0 if plus == NONE else values[plus]) - values[minus]
        if nbytes > room and nbytes * SMALL >= budget and live > LEAST_OVER:
            sides = {c: x for c, x in ((plus, 1.0), (minus, -1.0)) if c != NONE}
            rows.append((sides, -math.inf, -1.0 if plus == NONE else 0.0))
    return rows


def _most_broken_parts(load: Load, budget: int, values: Vector) -> int:
    """The parts whose row the point breaks most; 0 if it breaks none."""
    room = budget - load.constant
    if room <= 0 or not load.terms:
        return 0
    size, plus, minus = np.array(load.terms, dtype=np.int64).T
    live = np.where(plus == NONE, 1.0, values[plus]) - values[minus]
    counted = (live > 0.0) & (size > 0) & (size <= room)
    parts = np.arange(2, MOST_PARTS + 1)[:, None]
    exceeded = (size[counted] * parts - 1) // room
    over = (exceeded @ live[counted] - parts[:, 0] + 1) / parts[:, 0]
    best = int(over.argmax())
    return int(parts[best, 0]) if over[best] > LEAST_OVER else 0
