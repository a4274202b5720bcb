"""Plain chains of equal steps, and what binomial checkpointing needs on them.

x_0 -> f_1 -> x_1 -> ... -> f_l -> x_l, then b_l, ..., b_1; b_i makes the gradient g_i from g_{i+1}
and x_i, x_{i-1} or both. Every x_i is one unit, every run of an f_i one unit of time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from autoremat_solver import Op, Phase, Problem, Value

NEVER = 1 << 30


def binomial_extra_steps(length: int, slots: int) -> int:
    """The formula r l - C(s + r, s + 1), r the smallest with C(s + r, s) >= l [Griewank2000].

    It counts all forward steps but the l that the backward steps themselves begin with; so the
    l - 1 of the first sweep are among them, and save-all counts l - 1.
    """
    repeats = 0
    while math.comb(slots + repeats, slots) < length:
        repeats += 1
    return repeats * length - math.comb(slots + repeats, slots + 1)


@dataclass(frozen=True)
class PlainChain:
    """One plain chain.

    Attributes:
        length: l.
        reads: what b_i reads: "out" for x_i, "in" for x_{i-1}, "in+out" for both.
        gradient: units of each g_i, 0 or 1.
        start: x_0 is "resident", a "value" that may be made again, or "fixed": made once.
        unit_nbytes: bytes of one unit.
    """

    length: int
    reads: str = "out"
    gradient: int = 0
    start: str = "resident"
    unit_nbytes: int = 1

    def problem(self) -> Problem:
        """The chain as a step to plan."""
        values, ops = [], []
        resident = self.start == "resident"
        if not resident:
            values.append(Value("x0", self.unit_nbytes))
            ops.append(Op("f0", (), ("x0",), 1.0, recomputable=self.start == "value"))
        for i in range(1, self.length + 1):
            reads = () if i == 1 and resident else (f"x{i - 1}",)
            values.append(Value(f"x{i}", self.unit_nbytes))
            ops.append(Op(f"f{i}", reads, (f"x{i}",), 1.0))
        before: tuple[str, ...] = ()
        for i in range(self.length, 0, -1):
            reads = (f"x{i - 1}",) if "in" in self.reads and not (i == 1 and resident) else ()
            reads += (f"x{i}",) if "out" in self.reads else ()
            values.append(Value(f"g{i}", self.gradient * self.unit_nbytes))
            ops.append(Op(f"b{i}", before + reads, (f"g{i}",), 1.0, phase=Phase.BACKWARD))
            before = (f"g{i}",)
        return Problem(tuple(values), tuple(ops))

    def fewest_recomputes(self, units: int) -> int:
        """Runs beyond the first of each that any plan within the budget needs; or `NEVER`.

        Exact on bytes: while an f_i runs, its input and its output are live beside all that is
        held. That no plan does better is checked by exhaustive search for short chains.
        """
        if self.start != "fixed":
            return self._first_sweep(-1 if self.start == "value" else 0, units)
        best = self._first_sweep(0, units - 1)
        if self.reads == "out" and units >= 2:
            # Nobody reads x_0 again if x_1 is held to the end in its place.
            best = min(best, self._first_sweep(1, units - 1))
        return best

    def _first_sweep(self, start: int, units: int) -> int:
        """Extra runs from x_start on, all of which the first sweep may keep; x_start is held.

        Iterates from the end, so that no recursion is as deep as the chain.
        """
        least = {(self.length, m): 0 for m in range(units + 1)}
        for i in range(self.length - 1, start - 1, -1):
            for m in range(units + 1):
                least[i, m] = min(
                    (
                        least[j, m - 1] + self._back(i, j, True, m)
                        for j in range(i + 1, self.length + 1)
                        if min(j - i, 2) <= m
                    ),
                    default=NEVER,
                )
        return min(NEVER, least[start, units])

    def _back(self, s: int, t: int, has_last: bool, units: int) -> int:
        # b_1 is the last one even where x_0 can be made again: there is no b_0.
        return _back(
            t - s, max(0, -s), has_last, units, self.reads, self.gradient, t == self.length
        )


@cache
def _back(
    steps: int,
    lead: int,
    has_last: bool,
    units: int,
    reads: str,
    gradient: int,
    is_first: bool,
    is_made_now: bool = False,
) -> int:
    """The fewest runs of f that b_t, ..., b_{s+1} need; x_s is held beside the units.

    Args:
        steps: t - s.
        lead: 1 if the first of these steps has no backward (x_0 is itself made), else 0.
        has_last: whether x_t is held now, in one of the units.
        units: memory.
        reads: what the backward steps read.
        gradient: units of a gradient.
        is_first: whether b_t is the very first backward step, before which there is no gradient.
        is_made_now: x_t was made for b_t, so letting go of it would go in a circle.
    """
    if steps <= lead:
        return 0
    arriving = 0 if is_first else gradient
    rest = (reads, gradient, is_first)
    best = NEVER
    if has_last and not is_made_now:
        best = _back(steps, lead, False, units, *rest)
    if arriving + gradient + has_last <= units:
        if reads == "out" and has_last:
            best = min(best, _back(steps - 1, lead, False, units, reads, gradient, False))
        if steps == 1 and (reads == "in" or (reads == "in+out" and has_last)):
            best = 0
    for j in range(1, steps + (not has_last)):
        if has_last + arriving + min(j, 2) <= units:
            later = _back(steps - j, 0, has_last, units - 1, *rest)
            if j + later < best:
                is_all = is_first and j == steps
                earlier = _back(j, lead, True, units, reads, gradient, is_all, j == steps)
                best = min(best, j + later + earlier)
    return best
