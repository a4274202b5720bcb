"""The peak of a plan as a formula over sizes that vary: batch, sequence, image size.

Enters: polynomials in bytes, one for each step that may be the highest. Leaves: the peak at any
sizes, and text. Imports no torch; sympy only where a number is asked for.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from autoremat.reporting.fields import ReportError, check_fields
from autoremat.units import format_nbytes

_SHOWN = 4  # pieces in a line of text


@dataclass(frozen=True, slots=True)
class SizeSymbol:
    """A size that varies.

    Attributes:
        name: in the formula.
        source: where it comes from, such as "x.size(0)", or "".
        planned: what it was when the plan was made.
        lowest: smallest number for which the formula holds.
        highest: largest one; None for all.
    """

    name: str
    source: str
    planned: int
    lowest: int
    highest: int | None = None

    def __post_init__(self) -> None:
        """Refuses fields of the wrong type."""
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Piece:
    """What is live at one step.

    Attributes:
        nbytes: over the symbols, as sympy reads it; a fraction of a byte counts as none.
        step: name of the node that runs.
        phase: "forward" or "backward".
    """

    nbytes: str
    step: str
    phase: str

    def __post_init__(self) -> None:
        """Refuses fields of the wrong type."""
        check_fields(self)


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
            sizes: by the symbols' names; as planned where one is left out.

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
        for name, size in sizes.items():
            low, high = known[name].lowest, known[name].highest
            if size < low or (high is not None and size > high):
                upper = "on" if high is None else f"to {high}"
                raise ValueError(f"{name}={size} is out of range: it holds from {low} {upper}.")
        names = tuple(known)
        numbers = {
            symbol: sizes.get(name, known[name].planned) for name, symbol in _symbols(names).items()
        }
        return [math.floor(_read(piece.nbytes, names).subs(numbers)) for piece in self.pieces]

    def text(self) -> str:
        """For people: "max(3.1 MB * batch + 12.0 MB, ...)"."""
        names = tuple(symbol.name for symbol in self.symbols)
        shown = [_in_words(_read(piece.nbytes, names)) for piece in self.pieces[:_SHOWN]]
        more = len(self.pieces) - len(shown)
        shown += [f"{more} more"] if more else []
        return f"max({', '.join(shown)})" if len(shown) > 1 else shown[0]

    def legend(self) -> str:
        """What the symbols are, and where the formula holds."""
        return "; ".join(
            f"{s.name} from {s.lowest}{'' if s.highest is None else f' to {s.highest}'}"
            + (f" is {s.source}" if s.source else "")
            for s in self.symbols
        )

    def row(self, name: str, count: int = 33) -> list[tuple[int, int]]:
        """Sizes of one symbol and peaks, for a curve; the others as planned."""
        symbol = next(s for s in self.symbols if s.name == name)
        high = symbol.highest or 2 * symbol.planned
        step = max(1, (high - symbol.lowest) // (count - 1))
        sizes = list(itertools.chain(range(symbol.lowest, high, step), [high]))
        return [(size, self.at(**{name: size})) for size in sizes]


@lru_cache(maxsize=64)
def _symbols(names: tuple[str, ...]) -> dict[str, Any]:
    import sympy

    return {name: sympy.Symbol(name, integer=True, positive=True) for name in names}


@lru_cache(maxsize=1024)
def _read(nbytes: str, names: tuple[str, ...]) -> Any:
    import sympy

    return sympy.sympify(nbytes, locals=_symbols(names))


def _in_words(expression: Any) -> str:
    """Terms with their bytes, the highest powers first."""
    terms = []
    for factor, nbytes in sorted(
        ((str(f), c) for f, c in expression.expand().as_coefficients_dict().items()),
        key=lambda term: (-len(term[0]) if term[0] != "1" else 1, term[0]),
    ):
        size = format_nbytes(math.floor(abs(nbytes)))
        factor = factor.replace("**", "^")
        terms.append(
            ("- " if nbytes < 0 else "+ ") + size + ("" if factor == "1" else f" * {factor}")
        )
    return " ".join(terms).removeprefix("+ ") or "0 B"
