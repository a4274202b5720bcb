"""The peak of a plan as a formula over the sizes of its graph that vary.

Enters: a stated graph whose storages have symbolic sizes, and a plan of it. Leaves: a
`PeakFormula`, or None where nothing varies, or where which value is written over which depends on
the sizes. Guarantees: what is live at a step is what `simulate` counts there, value by value, with
each value's bytes as an expression; the result is held against `simulate` at the corners of the
range before it is returned. A step is left out only where another one is proven to be as high at
every size of the range.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import sympy
import torch
from autoremat_solver import Op, Plan, simulate
from autoremat_solver.simulate import backward_start, occupied_spans

from autoremat import _torch
from autoremat.inductor.laid_out import LAID_OUT
from autoremat.memory.storage_sizes import CUDA_ROUNDING
from autoremat.planning.choice import Choice, as_chosen
from autoremat.planning.sizes import sizes_of, subject_at, varying_by
from autoremat.problem.lower import without_spare_states
from autoremat.problem.shell import OPTIMIZER_STEP
from autoremat.problem.subject import Subject
from autoremat.reporting.formula import PeakFormula, Piece, SizeSymbol, Term

MOST_ENUMERATED = 1 << 14  # sizes at which pieces are compared one by one
_SOURCE = re.compile(r"L\['(\w+)'\](?:\[(?:'(\w+)'|(\d+))\])?\.size\(\)\[(\d+)\]")

_QUOTIENTS = {"FloorDiv": sympy.floor, "CeilDiv": sympy.ceiling}

Polynomial = Mapping[Any, Any]  # rational factors, in bytes, by monomials; never changed


def peak_formula(
    subject: Subject, plan: Plan, names: Mapping[Any, str] | None = None
) -> PeakFormula | None:
    """The formula of a plan's simulated peak, without states of draws that it repeats nowhere.

    Args:
        subject: the graph that the plan is of.
        plan: its plan.
        names: of symbols, as far as the user has named them.
    """
    planned = sizes_of(subject)
    if not planned:
        return None
    symbols = _symbols(subject, planned, names or {})
    expressions = _Expressions(subject, planned, symbols)
    steps = expressions.live_at(plan)
    ranges = {s: (named.lowest, named.highest) for s, named in symbols.items()}
    kept = _kept(steps, planned, ranges)
    start = backward_start(subject.lowered.problem, plan)
    names = {symbol: sympy.Symbol(named.name) for symbol, named in symbols.items()}
    pieces = tuple(
        Piece(
            terms=tuple(
                Term(str(factor), str(monomial.xreplace(names)))
                for monomial, factor in steps[step].items()
            ),
            step=plan.schedule[step],
            phase="backward" if step >= start else "forward",
        )
        for step in kept
    )
    found = PeakFormula(tuple(symbols.values()), pieces)
    return found if _agrees(found, subject, plan, symbols) else None


def formula_or_none(
    subject: Subject, choice: Choice, names: Mapping[Any, str] | None = None
) -> PeakFormula | None:
    """The same of a choice; None also where anything goes wrong: it is only told."""
    with suppress(Exception):
        return peak_formula(as_chosen(subject, choice), choice.solution.plan, names)
    return None


def _symbols(
    subject: Subject, planned: Mapping[Any, int], names: Mapping[Any, str]
) -> dict[Any, SizeSymbol]:
    """By torch's symbol, ours: named by the user, or after the input that it is a size of."""
    sizes = [s for s in subject.lowered.storages.sizes.values() if isinstance(s, torch.SymInt)]
    found: dict[Any, SizeSymbol] = {}
    for symbol in sorted(planned, key=str):
        size = next((one for one in sizes if symbol in _torch.size_symbols(one)), None)
        source = "" if size is None else _torch.symbol_source(size, symbol)
        low, high = (1, None) if size is None else _torch.symbol_range(size, symbol)
        taken = {one.name for one in found.values()}
        name, place = _named(source, symbol, taken | set(names.values()))
        said, follows = names.get(symbol, ""), ""
        if said.isidentifier() and said not in taken:
            name = said
        elif said in taken:
            follows = said
        found[symbol] = SizeSymbol(name, place, planned[symbol], max(1, low), high, follows)
    return found


def _named(source: str, symbol: Any, taken: set[str]) -> tuple[str, str]:
    """A name for the formula, and where the size comes from, as users write it."""
    match = _SOURCE.fullmatch(source)
    if match is None:
        return str(symbol), source
    root, key, number, dimension = match.groups()
    name = key or (f"input{number}" if number else root)
    is_batch = dimension == "0" and "batch" not in taken
    return "batch" if is_batch else f"{name}_{dimension}", f"{name}.size({dimension})"


class _Expressions:
    """Bytes of a graph's values and workspaces as polynomials."""

    def __init__(
        self, subject: Subject, planned: Mapping[Any, int], symbols: Mapping[Any, SizeSymbol]
    ) -> None:
        self._subject, self._planned = subject, planned
        storages = subject.lowered.storages
        lows = {symbol: named.lowest for symbol, named in symbols.items()}
        self._of_storage = {
            name: _rounded(plain_size(_torch.size_expression(size), lows), subject.device)
            for name, size in storages.sizes.items()
        }

    @property
    def _numbers(self) -> dict[Any, Any]:
        return {symbol: sympy.Integer(n) for symbol, n in self._planned.items()}

    def live_at(self, plan: Plan) -> list[Polynomial]:
        """What is live at each step."""
        problem = without_spare_states(self._subject.lowered.problem, plan)
        values = {value.name: value.nbytes for value in problem.values}
        change: list[dict[Any, Any]] = [defaultdict(int) for _ in range(len(plan.schedule) + 1)]
        for monomial, factor in self._resident(problem.resident_nbytes).items():
            change[0][monomial] += factor
        known: dict[str, Polynomial] = {}
        for name, born, last in occupied_spans(problem, plan):
            if name not in known:
                known[name] = self._value(name, values[name])
            for monomial, factor in known[name].items():
                change[born][monomial] += factor
                change[last + 1][monomial] -= factor
        workspaces = {op.name: self._workspace(op) for op in problem.ops if op.workspace_nbytes}
        found: list[Polynomial] = []
        live = defaultdict[Any, Any](int)
        for step, name in enumerate(plan.schedule):
            for monomial, factor in change[step].items():
                live[monomial] += factor
            here = dict(live)
            for monomial, factor in workspaces.get(name, {}).items():
                here[monomial] = here.get(monomial, 0) + factor
            found.append({monomial: factor for monomial, factor in here.items() if factor})
        return found

    def _value(self, name: str, nbytes: int) -> Polynomial:
        """A value's, with what it takes beyond its storage's fake size."""
        return self._shifted(self._of_storage.get(name.removesuffix(LAID_OUT)), nbytes)

    def _resident(self, nbytes: int) -> Polynomial:
        counted = self._subject.lowered.storages.resident - self._subject.handed_over
        varying = [self._of_storage[n] for n in counted if n in self._of_storage]
        others = {s: n for s, n in self._subject.sizes.items() if s not in self._planned}
        absent = (nbytes.xreplace(others) for nbytes in self._subject.absent)
        varying += [_rounded(nbytes, self._subject.device) for nbytes in absent]
        return self._shifted(sum(varying, sympy.Integer(0)), nbytes)

    def _shifted(self, expression: Any, nbytes: int) -> Polynomial:
        """An expression, and as much more as makes it so many bytes at the planned sizes."""
        if expression is None or expression.is_number:
            return {sympy.Integer(1): nbytes}
        rest = nbytes - int(expression.xreplace(self._numbers))
        return terms_of(expression + rest)

    def _workspace(self, op: Op) -> Polynomial:
        """What an operation takes for itself; see `subject_at`."""
        if op.name == OPTIMIZER_STEP:  # the same of every batch
            return {sympy.Integer(1): op.workspace_nbytes}
        lowered = self._subject.lowered
        if op.name not in lowered.node_of:
            return terms_of(self._growth(self._of_storage) * op.workspace_nbytes)
        varying = varying_by(lowered, op.name)
        if not varying:
            return {sympy.Integer(1): op.workspace_nbytes}
        fixed_nbytes = min(op.workspace_nbytes, lowered.fixed_nbytes.get(op.name, 0))
        return terms_of(fixed_nbytes + self._growth(varying) * (op.workspace_nbytes - fixed_nbytes))

    def _growth(self, names: Iterable[str]) -> Any:
        """Of storages together, over what they take at the planned sizes."""
        nbytes = sum(self._subject.lowered.storages.nbytes[name] for name in names)
        whole = sum((self._of_storage[n] for n in names if n in self._of_storage), sympy.Integer(0))
        rest = nbytes - int(whole.xreplace(self._numbers))
        return (whole + rest) / max(1, nbytes)


def _rounded(size: Any, device: torch.device) -> Any:
    """A storage's bytes as its device's allocator rounds them."""
    if device.type != "cuda" or all(n % CUDA_ROUNDING == 0 for n in terms_of(size).values()):
        return size
    return CUDA_ROUNDING * sympy.ceiling(size / CUDA_ROUNDING)


def plain_size(size: Any, lows: Mapping[Any, int]) -> Any:
    """A size without torch's own functions, and without a choice that the range has made."""
    if not size.args:
        return size
    args = [plain_size(one, lows) for one in size.args]
    kind = type(size).__name__
    if kind in ("FloorDiv", "CleanDiv", "CeilDiv"):
        quotient = args[0] / args[1]
        return quotient if kind == "CleanDiv" else _QUOTIENTS[kind](quotient)
    if kind in ("Mod", "PythonMod"):
        return sympy.Mod(*args)
    if kind in ("Max", "Min"):
        above = {symbol: symbol + low for symbol, low in lows.items()}
        first, *others = args
        for other in others:
            difference = terms_of((first - other).xreplace(above))
            if all(n >= 0 for n in difference.values()):
                first = first if kind == "Max" else other
            elif all(n <= 0 for n in difference.values()):
                first = other if kind == "Max" else first
            else:
                first = (sympy.Max if kind == "Max" else sympy.Min)(first, other)
        return first
    return size.func(*args)


def terms_of(expression: Any) -> Polynomial:
    """Factors of an expression by their monomials."""
    return dict(sympy.expand(expression).as_coefficients_dict())


def _expression(polynomial: Polynomial) -> Any:
    return sum((factor * monomial for monomial, factor in polynomial.items()), sympy.Integer(0))


# --- which steps may be the highest --------------------------------------------------------------


def _kept(
    steps: Sequence[Polynomial],
    planned: Mapping[Any, int],
    ranges: Mapping[Any, tuple[int, int | None]],
) -> list[int]:
    """Numbers of steps of which each is the highest at some size, as far as that can be proven."""
    first: dict[frozenset[Any], int] = {}
    for number, step in enumerate(steps):
        first.setdefault(frozenset(step.items()), number)
    numbers = {symbol: sympy.Integer(n) for symbol, n in planned.items()}
    candidates = sorted(
        first.values(), key=lambda n: _expression(steps[n]).xreplace(numbers), reverse=True
    )
    kept: list[int] = []
    for number in candidates:
        if not any(_is_below(steps[number], steps[other], ranges) for other in kept):
            kept = [n for n in kept if not _is_below(steps[n], steps[number], ranges)]
            kept.append(number)
    return _somewhere_highest(kept, steps, ranges)


def _is_below(
    one: Polynomial, other: Polynomial, ranges: Mapping[Any, tuple[int, int | None]]
) -> bool:
    """Whether a polynomial is proven to be nowhere above another.

    Either their difference has no negative factor once each symbol is its lowest number and what
    is above that; or it is linear in each symbol, and not negative in the corners of the range.
    """
    difference = {m: other.get(m, 0) - one.get(m, 0) for m in {*one, *other}}
    if all(factor >= 0 for factor in difference.values()):
        return True
    expression = _expression(difference)
    if not expression.is_polynomial(*ranges):
        return False
    above = {symbol: symbol + low for symbol, (low, _) in ranges.items()}
    if all(factor >= 0 for factor in terms_of(expression.xreplace(above)).values()):
        return True
    is_linear = all(sympy.degree(expression, gen=symbol) <= 1 for symbol in ranges)
    ends = [(low, high) for low, high in ranges.values()]
    if not is_linear or any(high is None for _, high in ends):
        return False
    return all(value >= 0 for value in _at(expression, ranges, itertools.product(*ends)))


def _at(
    expression: Any, ranges: Mapping[Any, Any], corners: Iterator[tuple[Any, ...]]
) -> Iterator[Any]:
    for corner in corners:
        yield expression.xreplace(
            dict(zip(ranges, (sympy.Integer(number) for number in corner), strict=True))
        )


def _somewhere_highest(
    kept: list[int],
    steps: Sequence[Polynomial],
    ranges: Mapping[Any, tuple[int, int | None]],
) -> list[int]:
    """Of the steps, those that are the first highest at some size, where all can be tried."""
    extents = [range(low, (high or 0) + 1) for low, high in ranges.values()]
    count = 1
    for extent in extents:
        count *= len(extent)
    if len(kept) < 2 or not 0 < count * len(kept) <= MOST_ENUMERATED * 8 or count > MOST_ENUMERATED:
        return kept
    functions = [sympy.lambdify(list(ranges), _expression(steps[n]), "math") for n in kept]
    found: set[int] = set()
    for sizes in itertools.product(*extents):
        heights = [function(*sizes) for function in functions]
        found.add(kept[heights.index(max(heights))])
    return [number for number in kept if number in found]


# --- held against the simulator ------------------------------------------------------------------


def _agrees(
    formula: PeakFormula, subject: Subject, plan: Plan, symbols: Mapping[Any, SizeSymbol]
) -> bool:
    """Whether it is what `simulate` finds as planned, and in the corners of the range."""
    ends = [
        (one.lowest, one.planned, 2 * one.planned if one.highest is None else one.highest)
        for one in symbols.values()
    ]
    for corner in itertools.product(*ends):
        numbers = dict(zip(symbols, corner, strict=True))
        problem = without_spare_states(subject_at(subject, numbers).lowered.problem, plan)
        sizes = {symbols[symbol].name: number for symbol, number in numbers.items()}
        if simulate(problem, plan).peak_nbytes != formula.at(**sizes):
            return False
    return True
