"""One plan for a range of sizes: where it is made, and that it holds at all sizes below.

Enters: sizes of a graph's inputs, each with the range that was said of it; then the graph, stated
at the upper corner of all ranges, and its plan. Leaves: the corner, what the model's own code makes
of the ranges, a proof, and the largest sizes that fit where the corner does not.

The proof is by values. What is live at a step is a sum of values and a workspace. Where each of
them is nowhere larger than in the corner, and what is written over has room at every size as it
has there, no step is anywhere higher than in the corner. Products and sums of sizes grow with them,
quotients that are rounded as well; what does not is tried at all sizes of its symbols.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sympy
import torch
from autoremat_solver import Plan, simulate
from autoremat_solver.simulate import instance_spans, occupied_spans

from autoremat import _torch
from autoremat.ask.sizes import Extent
from autoremat.inductor.laid_out import LAID_OUT
from autoremat.planning.formula import plain_size, terms_of
from autoremat.planning.sizes import Symbols, lowest_of, sizes_of, subject_at
from autoremat.problem.subject import Subject
from autoremat.units import format_nbytes

MOST_TRIED = 1 << 14  # sizes of one value that are tried one by one
_SHARES = 1 << 12
CHECKED = 5  # sizes of each symbol at which an unproven plan is simulated


class Narrowed(NamedTuple):
    """A range that the model's own code makes smaller.

    Attributes:
        extent: what was said.
        most: the largest size of which this graph is.
        is_constant: whether it is the only one.
        line: of the model, where that is decided; "" if nobody says.
    """

    extent: Extent
    most: int
    is_constant: bool
    line: str

    @property
    def facts(self) -> dict[str, Any]:
        """What AR119 says of it."""
        how = f"only {self.most}" if self.is_constant else f"at most {self.most}"
        line = f", decided at {self.line}" if self.line else ""
        name, low, high = self.extent.name, self.extent.low, self.extent.high
        return {"name": name, "low": low, "high": high, "how": how, "line": line}


class Ranged(NamedTuple):
    """A size of an input of a graph that has a range.

    Attributes:
        size: a symbol, or the constant that has come of it.
        extent: its range.
        fixed_at: finds the line of the model that made it a constant; "" if nobody says.
        is_sure: whether it is known to be this size, and not another one of the same number.
    """

    size: int | torch.SymInt
    extent: Extent
    fixed_at: Callable[[], str] = str
    is_sure: bool = True


def corner_of(ranges: Sequence[Ranged]) -> tuple[dict[Any, int], list[Narrowed]]:
    """The largest numbers that a graph's symbols stand for, and what its code leaves out.

    Args:
        ranges: sizes of its inputs.
    """
    corner: dict[Any, int] = {}
    narrowed: list[Narrowed] = []
    for size, extent, fixed_at, _ in ranges:
        expression, is_wide = _torch.size_expression(size), extent.low < extent.high
        if expression.is_number:
            if is_wide and int(expression) > 1:  # torch has code of its own for 1
                narrowed.append(Narrowed(extent, int(expression), True, fixed_at()))
            continue
        if isinstance(size, int) or not expression.is_symbol:
            continue
        _, most = _torch.symbol_range(size, expression)
        if is_wide and most is not None and most < extent.high:
            narrowed.append(Narrowed(extent, most, False, _torch.bounded_at(size)))
        highest = min(extent.high, most or extent.high)
        corner[expression] = min(highest, corner.get(expression, highest))
    return corner, narrowed


def names_of(ranges: Sequence[Ranged]) -> dict[Any, str]:
    """What users call the symbols of these sizes."""
    found = ((_torch.size_expression(one.size), one.extent.name) for one in ranges)
    return {expression: name for expression, name in found if expression.is_symbol}


def lows_of(ranges: Sequence[Ranged]) -> dict[Any, int]:
    """The smallest numbers that the symbols were said to be, of sizes that are surely these."""
    found = ((_torch.size_expression(r.size), r.extent.low) for r in ranges if r.is_sure)
    return {expression: low for expression, low in found if expression.is_symbol}


@dataclass(frozen=True)
class Covered:
    """At which sizes a plan keeps the peak that it has in its corner.

    Attributes:
        sizes: each range: its name, and the largest size.
        unproven: values of which that is not proven; empty if it is proven of all.
        checked: how many sizes were simulated instead.
        above_nbytes: by how much the highest of these is above the corner's.
        names: of symbols, as users know them.
    """

    sizes: tuple[tuple[str, int], ...]
    unproven: tuple[str, ...] = ()
    checked: int = 0
    above_nbytes: int = 0
    names: Mapping[Any, str] = field(default_factory=dict)

    @property
    def is_proven(self) -> bool:
        """Whether it holds at every size."""
        return not self.unproven

    def shrunk(self, ratios: Mapping[Any, float]) -> float:
        """By which factor the largest sizes are larger, all taken together.

        Args:
            ratios: of each symbol, of which inputs may have several for one size.
        """
        by_name: dict[Any, float] = {}
        for symbol, ratio in ratios.items():
            name = self.names.get(symbol, symbol)
            by_name[name] = max(ratio, by_name.get(name, 1.0))
        return math.prod(by_name.values())

    def __str__(self) -> str:
        """For reports."""
        text = ", ".join(dict.fromkeys(f"{name} up to {high}" for name, high in self.sizes))
        if self.is_proven:
            return f"one plan for {text}: proven to peak nowhere higher than with the largest"
        above = format_nbytes(self.above_nbytes)
        return (
            f"one plan for {text}: not all of it grows with the sizes "
            f"({', '.join(self.unproven[:3])}); of {self.checked} sizes that were simulated, the "
            f"highest peak is {above} above that of the largest, and each step is looked at"
        )


def covered(subject: Subject, plan: Plan, names: Mapping[Any, str]) -> Covered:
    """Whether a plan's peak is nowhere above that of the sizes that it was made for.

    Args:
        subject: the graph, stated there.
        plan: its plan.
        names: of symbols, as users know them.
    """
    highest = sizes_of(subject)
    lowest = {symbol: lowest_of(subject, symbol) for symbol in highest}
    sizes = tuple((names[symbol], highest[symbol]) for symbol in highest if symbol in names)
    unproven = tuple(dict.fromkeys(_above_their_corner(subject, plan, lowest, highest)))
    if not unproven:
        return Covered(sizes, names=names)
    tried = list(_grid(lowest, highest))
    most_nbytes = simulate(subject.lowered.problem, plan).peak_nbytes
    peaks = [simulate(subject_at(subject, n).lowered.problem, plan).peak_nbytes for n in tried]
    return Covered(sizes, unproven, len(tried), max(0, max(peaks) - most_nbytes), names)


def largest_fitting(
    subject: Subject, plan: Plan, budget_nbytes: int, names: Mapping[Any, str]
) -> tuple[list[tuple[str, int]], bool]:
    """By size, the largest at which a plan fits beside the largest of all others, and True.

    Where none alone is enough, all are made smaller by the same share, and it is False.

    Args:
        subject: the graph, stated at the upper corner of its ranges.
        plan: a lean plan of it, which does not fit there.
        budget_nbytes: of the step.
        names: of symbols, as users know them.
    """
    corner = {symbol: n for symbol, n in sizes_of(subject).items() if symbol in names}

    def fits(numbers: Symbols) -> bool:
        problem = subject_at(subject, numbers).lowered.problem
        return simulate(problem, plan).peak_nbytes <= budget_nbytes

    lowest = {symbol: lowest_of(subject, symbol) for symbol in corner}
    found = []
    for symbol, high in corner.items():

        def alone_fits(n: int, symbol: Any = symbol) -> bool:
            return fits({**corner, symbol: n})

        best = largest_between(lowest[symbol], high, alone_fits)
        if best is not None:
            found.append((names[symbol], best))
    if found:
        return found, True

    def shares(n: int) -> dict[Any, int]:
        return {s: max(lowest[s], high * n // _SHARES) for s, high in corner.items()}

    share = largest_between(1, _SHARES, lambda n: fits(shares(n)))
    return [(names[s], n) for s, n in shares(share).items()] if share else [], False


def largest_between(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number that fits, of those between two; None if not even the least does."""
    if not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _grid(lowest: Symbols, highest: Symbols) -> Iterator[dict[Any, int]]:
    """Sizes between two corners, both included."""
    axes = [
        sorted({low + (high - low) * n // (CHECKED - 1) for n in range(CHECKED)})
        for low, high in zip(lowest.values(), highest.values(), strict=True)
    ]
    for numbers in itertools.product(*axes):
        yield dict(zip(highest, numbers, strict=True))


# --- the proof -----------------------------------------------------------------------------------


def _above_their_corner(
    subject: Subject, plan: Plan, lowest: Symbols, highest: Symbols
) -> Iterator[str]:
    """Values that may be larger at other sizes than in the corner, or have no room there."""
    storages = subject.lowered.storages
    expressions = {
        name: plain_size(_torch.size_expression(size), lowest)
        for name, size in storages.sizes.items()
    }
    known: dict[Any, bool] = {}
    for name, expression in expressions.items():
        if expression not in known:
            known[expression] = _is_highest_in_corner(expression, lowest, highest)
        if not known[expression]:
            yield name
    problem = subject.lowered.problem
    if not any(op.overwrites for op in problem.ops):
        return
    for name, room in _written_over(subject, plan):
        sizes = [expressions.get(n.removesuffix(LAID_OUT), sympy.Integer(0)) for n in (name, *room)]
        spare = sum(sizes[1:], sympy.Integer(0)) - sizes[0]
        if not _is_never_below(spare, lowest, highest):
            yield name


def _written_over(subject: Subject, plan: Plan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What is written over in the corner, and what lies there afterwards."""
    problem = subject.lowered.problem
    ends = zip(instance_spans(problem, plan), occupied_spans(problem, plan), strict=True)
    for (name, _, last), (_, _, shorter) in ends:
        if shorter < last:
            yield name, problem.op_by_name[plan.steps[last].target].outputs


def _is_highest_in_corner(expression: Any, lowest: Symbols, highest: Symbols) -> bool:
    """Whether bytes are nowhere more than at the largest sizes."""
    if _grows(expression, lowest):
        return True
    most = expression.xreplace(_integers(highest))
    return _is_never_below(most - expression, lowest, highest)


def _grows(expression: Any, lowest: Symbols) -> bool:
    """Whether an expression does not become less as its symbols grow; sufficient."""
    if expression.is_number or expression.is_symbol:
        return True
    kind = type(expression).__name__
    if kind in ("Add", "floor", "ceiling", "Max", "Min"):
        if all(_grows(one, lowest) for one in expression.args):
            return True
    elif kind == "Mul":
        factors = expression.args
        if all(_grows(one, lowest) and _least(one, lowest) >= 0 for one in factors):
            return True
    elif kind == "Pow":
        base, exponent = expression.args
        is_power = exponent.is_Integer and exponent > 0
        if is_power and _grows(base, lowest) and _least(base, lowest) >= 0:
            return True
    if not expression.is_polynomial(*expression.free_symbols):
        return False
    above = {symbol: symbol + low for symbol, low in lowest.items()}
    terms = terms_of(expression.xreplace(above))
    return all(factor >= 0 for monomial, factor in terms.items() if not monomial.is_number)


def _least(expression: Any, lowest: Symbols) -> Any:
    """The value of what grows, at the smallest sizes."""
    value = expression.xreplace(_integers(lowest))
    return value if value.is_number else sympy.Integer(-1)


def _is_never_below(expression: Any, lowest: Symbols, highest: Symbols) -> bool:
    """Whether an expression is nowhere less than 0: by its factors, in corners, or at all sizes."""
    symbols = sorted(expression.free_symbols, key=str)
    if not symbols:
        return bool(expression >= 0)
    if any(symbol not in highest for symbol in symbols):
        return False
    ends = [(lowest[symbol], highest[symbol]) for symbol in symbols]
    if expression.is_polynomial(*symbols):
        above = {symbol: symbol + lowest[symbol] for symbol in symbols}
        if all(factor >= 0 for factor in terms_of(expression.xreplace(above)).values()):
            return True
        if all(sympy.degree(expression, gen=symbol) <= 1 for symbol in symbols):
            return all(_at(expression, symbols, corner) >= 0 for corner in itertools.product(*ends))
    count = 1
    for low, high in ends:
        count *= max(0, high - low) + 1
    if count > MOST_TRIED:
        return False
    value = sympy.lambdify(symbols, expression, "math")
    return all(value(*n) >= 0 for n in itertools.product(*(range(a, b + 1) for a, b in ends)))


def _at(expression: Any, symbols: Sequence[Any], numbers: Sequence[int]) -> Any:
    return expression.xreplace(_integers(dict(zip(symbols, numbers, strict=True))))


def _integers(numbers: Symbols) -> dict[Any, Any]:
    return {symbol: sympy.Integer(n) for symbol, n in numbers.items()}
