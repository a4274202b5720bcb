"""The peak of a plan as a formula over sizes that vary: batch, sequence, image size.

Enters: polynomials in bytes, one for each step that may be the highest. Leaves: the peak at any
sizes, in whole numbers and fractions, and text. Imports neither torch nor sympy.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from autoremat.reporting.fields import ReportError, check_fields
from autoremat.units import format_nbytes

_SHOWN = 4  # pieces in a line of text
_MOST_TRIED = 625  # sizes at which the highest piece is looked for
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class SizeSymbol:
    """A size that varies.

    Attributes:
        name: in the formula.
        source: where it comes from, such as "x.size(0)", or "".
        planned: what it was when the plan was made.
        lowest: smallest number for which the formula holds.
        highest: largest one; None for all.
        follows: the symbol that the user calls the same, such as the batch of another input: it is
            taken to be of that size where nothing else is said. "" if there is none.
    """

    name: str
    source: str
    planned: int
    lowest: int
    highest: int | None = None
    follows: str = ""

    def __post_init__(self) -> None:
        """Refuses fields of the wrong type."""
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Term:
    """So many bytes for each of something.

    Attributes:
        nbytes: a number, perhaps a fraction or below zero: "1048576", "4097/2", "-512".
        each: a product of symbols, such as "batch*input0_1**2"; "1" for what is always there. In it
            may be `floor`, `ceiling`, `Max`, `Min` and `Mod`, as sympy writes them.
    """

    nbytes: str
    each: str

    def __post_init__(self) -> None:
        """Refuses fields of the wrong type, and what is no number or no product.

        Raises:
            ReportError: naming what is wrong.
        """
        check_fields(self)
        try:
            Fraction(self.nbytes)
            _parsed(self.each)
        except (ValueError, SyntaxError, ZeroDivisionError) as error:
            raise ReportError(f"{self.nbytes!r:.80} * {self.each!r:.80} is no term.") from error


@dataclass(frozen=True, slots=True)
class Piece:
    """What is live at one step.

    Attributes:
        terms: whose sum it is; a fraction of a byte counts as none.
        step: name of the node that runs.
        phase: "forward" or "backward".
    """

    terms: tuple[Term, ...]
    step: str
    phase: str

    def __post_init__(self) -> None:
        """Refuses fields of the wrong type."""
        check_fields(self)

    def at(self, sizes: Mapping[str, int]) -> int:
        """In bytes, at these sizes of all symbols."""
        numbers = {name: Fraction(size) for name, size in sizes.items()}
        return math.floor(sum(Fraction(t.nbytes) * _value(t.each, numbers) for t in self.terms))


@dataclass(frozen=True, slots=True)
class PeakFormula:
    """The peak of one graph's plan, as simulated: the largest of its pieces.

    Exact, to the byte, at all sizes between the lowest and the highest: steps that are left out
    are at no such size above all of these.

    Attributes:
        symbols: what it is over.
        pieces: the steps that may be the highest, of forward and backward.
    """

    symbols: tuple[SizeSymbol, ...]
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        """Refuses fields of the wrong type, and a formula without pieces.

        Raises:
            ReportError: naming what is wrong.
        """
        check_fields(self)
        if not self.pieces or not self.symbols:
            raise ReportError("A formula of a peak has pieces, and sizes that vary.")

    def at(self, **sizes: int) -> int:
        """The peak in bytes.

        Args:
            sizes: by the symbols' names; where one is left out, that of the symbol that it
                follows, or as planned.

        Raises:
            ValueError: if a size is none of the formula's, or out of its range.
        """
        return max(self.pieces_at(**sizes))

    def pieces_at(self, **sizes: int) -> list[int]:
        """Each piece in bytes; as `at`."""
        known = {symbol.name: symbol for symbol in self.symbols}
        unknown = sizes.keys() - known.keys()
        if unknown:
            raise ValueError(
                f"{min(unknown)!r} is no size of this formula: it is over {', '.join(known)}."
            )
        numbers = {
            name: sizes.get(name, sizes.get(symbol.follows, symbol.planned))
            for name, symbol in known.items()
        }
        for name, symbol in known.items():
            size, low, high = numbers[name], symbol.lowest, symbol.highest
            is_said = name in sizes or symbol.follows in sizes
            if is_said and (size < low or (high is not None and size > high)):
                upper = "on" if high is None else f"to {high}"
                raise ValueError(f"{name}={size} is out of range: it holds from {low} {upper}.")
        return [piece.at(numbers) for piece in self.pieces]

    def text(self) -> str:
        """For people: "max(3.1 MB * batch + 12.0 MB, ...)".

        The pieces first that are the highest at most sizes. What follows another size is written
        as that one, and less than a byte is left out.
        """
        followed = {symbol.name: symbol.follows for symbol in self.symbols if symbol.follows}
        words = (_in_words(piece.terms, followed) for piece in self._by_sizes())
        known = list(dict.fromkeys(words))
        shown, more = known[:_SHOWN], len(known[_SHOWN:])
        shown += [f"{more} more"] if more else []
        return f"max({', '.join(shown)})" if len(shown) > 1 else shown[0]

    def _by_sizes(self) -> list[Piece]:
        """The pieces, those first that are the highest at more of a few sizes."""
        leading = [symbol for symbol in self.symbols if not symbol.follows]
        axes = ([(s.name, size) for size in _few(*self._range(s.name))] for s in leading)
        count = dict.fromkeys(range(len(self.pieces)), 0)
        for sizes in itertools.islice(itertools.product(*axes), _MOST_TRIED):
            found = self.pieces_at(**dict(sizes))
            count[found.index(max(found))] += 1
        return [self.pieces[n] for n in sorted(count, key=lambda n: (-count[n], n))]

    def _range(self, name: str) -> tuple[int, int]:
        """The smallest and the largest of a size and of those that follow it."""
        along = [s for s in self.symbols if name in (s.name, s.follows)]
        planned = next(s.planned for s in along if s.name == name)
        low = max(s.lowest for s in along)
        return low, max(low, min((s.highest for s in along if s.highest), default=2 * planned))

    def legend(self) -> str:
        """What the symbols are, and where the formula holds."""
        return "; ".join(
            f"{s.name} from {s.lowest}{'' if s.highest is None else f' to {s.highest}'}"
            + (f" is {s.source}" if s.source else "")
            + (f", {s.follows} unless you say otherwise" if s.follows else "")
            for s in self.symbols
        )

    def up_to_planned(self) -> PeakFormula:
        """The same for no larger sizes than the plan was made for."""
        symbols = (replace(symbol, highest=symbol.planned) for symbol in self.symbols)
        return replace(self, symbols=tuple(symbols))

    def row(self, name: str, count: int = 33) -> list[tuple[int, int]]:
        """Sizes of one symbol and peaks, for a curve; what does not follow it is as planned."""
        low, high = self._range(name)
        step = max(1, (high - low) // (count - 1))
        sizes = list(itertools.chain(range(low, high, step), [high]))
        return [(size, self.at(**{name: size})) for size in sizes]


def _few(low: int, high: int) -> list[int]:
    """Sizes from the smallest to the largest."""
    return sorted({low + (high - low) * n // 4 for n in range(5)})


def _in_words(terms: tuple[Term, ...], followed: Mapping[str, str]) -> str:
    """Terms with their bytes, the highest powers first.

    Args:
        terms: of a piece.
        followed: the names that stand for others.
    """
    factors: dict[str, Fraction] = {}
    for term in terms:
        each = _renamed(term.each, followed)
        factors[each] = factors.get(each, Fraction(0)) + Fraction(term.nbytes)
    words = []
    for each, nbytes in sorted(factors.items(), key=lambda f: (f[0] == "1", -len(f[0]), f[0])):
        if abs(nbytes) >= 1:
            product = "" if each == "1" else f" * {each}"
            words.append(f"{'-' if nbytes < 0 else '+'} {format_nbytes(int(abs(nbytes)))}{product}")
    return " ".join(words).removeprefix("+ ") or "0 B"


def _renamed(product: str, followed: Mapping[str, str]) -> str:
    """A product of these names, its factors in order, powers as people write them."""
    product = _NAME.sub(lambda name: followed.get(name[0], name[0]), product.replace("**", "^"))
    return product if "(" in product else "*".join(sorted(product.split("*")))


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "floor": math.floor,
    "ceiling": math.ceil,
    "Max": max,
    "Min": min,
    "Mod": operator.mod,
}


@lru_cache(maxsize=4096)
def _parsed(text: str) -> ast.expr:
    """A product as a tree of what is allowed in one."""
    tree = ast.parse(text, mode="eval").body
    for node in ast.walk(tree):
        is_known = isinstance(node, ast.Name | ast.Load | ast.operator | ast.USub | ast.UnaryOp)
        is_known |= isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS
        is_known |= isinstance(node, ast.Constant) and type(node.value) is int
        is_known |= isinstance(node, ast.Call) and getattr(node.func, "id", "") in _FUNCTIONS
        if not is_known:
            raise ValueError(text)
    return tree


def _value(text: str, numbers: Mapping[str, Fraction]) -> Fraction:
    def of(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp):
            return Fraction(_OPERATORS[type(node.op)](of(node.left), of(node.right)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return Fraction(_FUNCTIONS[node.func.id](*map(of, node.args)))
        if isinstance(node, ast.UnaryOp):
            return -of(node.operand)
        if isinstance(node, ast.Name):
            return numbers[node.id]
        assert isinstance(node, ast.Constant)
        return Fraction(str(node.value))

    return of(_parsed(text))
