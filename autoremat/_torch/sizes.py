"""Private names of symbolic sizes: what numbers they stand for, and who bounded them.

Guarantees: importing this imports nothing that compiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint

__all__ = [
    "bounded_at",
    "can_be_bounded",
    "fixed_at",
    "same_sizes",
    "size_expression",
    "size_hint",
    "size_symbols",
    "sized",
    "sizes_as",
    "sizes_as_seen",
    "symbol_range",
    "symbol_source",
]

_NO_BOUND = 1 << 48  # torch writes a bound at the end of its numbers where there is none


def can_be_bounded(size: torch.SymInt, most: int) -> bool:
    """Whether a guard may keep a symbolic size from being larger than a number.

    Not where the size is known only when the code runs, where the user has given it bounds, which
    torch insists on, and where it could not be smaller either, if the user has marked it as one
    that varies: it would become a constant.
    """
    if not isinstance(getattr(size.node, "hint", None), int):
        return False
    asked = [found for found in _user_constraints(size) if not found.warn_only]
    if any(isinstance(constraint, StrictMinMaxConstraint) for constraint in asked):
        return False
    lower = size.node.shape_env.bound_sympy(size.node.expr).lower
    return not asked or bool(lower < most)


def _user_constraints(size: torch.SymInt) -> Iterator[Any]:
    """What the user has demanded of a symbolic size (`torch._dynamo.mark_dynamic`)."""
    for tracked in size.node.shape_env.tracked_fakes or ():
        demanded = getattr(tracked.symbolic_context, "constraint_sizes", ())
        for extent, constraint in zip(getattr(tracked.fake, "shape", ()), demanded, strict=False):
            if constraint is None or not isinstance(extent, torch.SymInt):
                continue
            if extent.node.expr.free_symbols & size.node.expr.free_symbols:
                yield constraint


class _Numbers(NamedTuple):
    """What symbols stand for, and what came of it: many sizes of a graph are alike."""

    of_symbols: Mapping[Any, Any]
    known: dict[tuple[Any, Any], int]  # by what made the symbols, and expression


_sizes: ContextVar[_Numbers | None] = ContextVar("sizes", default=None)


@contextmanager
def sizes_as(numbers: Mapping[Any, int]) -> Iterator[None]:
    """Let symbolic sizes stand for other numbers than while tracing, in this context.

    Args:
        numbers: by symbol, as `size_symbols` gives them.
    """
    of_symbols = {symbol: sympy.Integer(n) for symbol, n in numbers.items()}
    token = _sizes.set(_Numbers(of_symbols, {}))
    try:
        yield
    finally:
        _sizes.reset(token)


@contextmanager
def sizes_as_seen() -> Iterator[None]:
    """What is compiled in this context is for the sizes at hand, whichever were seen before."""
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        yield


def sized(expression: Any) -> Any:
    """An expression of sympy's over sizes, with the numbers of `sizes_as` in place of symbols."""
    numbers = _sizes.get()
    if numbers is None or not hasattr(expression, "xreplace"):
        return expression
    return expression.xreplace(numbers.of_symbols)


def size_symbols(size: int | torch.SymInt) -> dict[Any, int]:
    """The symbols in a size that inputs decide, with the numbers they stood for while tracing."""
    if isinstance(size, int):
        return {}
    env = size.node.shape_env
    found = getattr(env, "backed_var_to_val", None) or env.var_to_val
    return {s: int(found[s]) for s in size.node.expr.free_symbols if s in found}


def size_expression(size: int | torch.SymInt) -> Any:
    """The size as an expression of sympy's over the symbols that `size_symbols` gives."""
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def same_sizes(left: Iterable[int | torch.SymInt], right: Iterable[int | torch.SymInt]) -> bool:
    """Whether sizes are the same whatever their symbols stand for, without a guard on those."""
    return [*map(size_expression, left)] == [*map(size_expression, right)]


def symbol_source(size: torch.SymInt, symbol: Any) -> str:
    """Where a symbol comes from, as guards write it: "L['x'].size()[0]"; "" if nobody says."""
    env = size.node.shape_env
    sources = getattr(env, "var_to_sources", None) or getattr(env, "source_to_var", {})
    found = sources.get(symbol) or ()
    return next((_source_name(source) for source in found), "")


def _source_name(source: Any) -> str:
    name = source.name  # a property since torch 2.13, a method before
    return str(name() if callable(name) else name)


def symbol_range(size: torch.SymInt, symbol: Any) -> tuple[int, int | None]:
    """The least and the greatest number that a symbol stands for; None where nothing bounds it."""
    found = size.node.shape_env.bound_sympy(symbol)
    high = int(found.upper) if isinstance(found.upper, sympy.Integer) else None  # or an infinity
    return int(found.lower), None if high is None or high > _NO_BOUND else high


def bounded_at(size: torch.SymInt) -> str:
    """The user's line that bounded a symbol from above: code, file and line; "" if nobody says."""
    bounds = size.node.shape_env.var_to_range_sloc.get(size.node.expr)
    return "" if bounds is None else _users_line(bounds.upper)


def fixed_at(fake: torch.Tensor, dimension: int) -> str:
    """The same of a line that made a size of an input a constant."""
    env = getattr(getattr(fake, "fake_mode", None), "shape_env", None)
    for symbol, number in () if env is None else env.replacements.items():
        source = next(iter(env.var_to_sources.get(symbol, ())), None)
        is_size = source is not None and _source_name(source).endswith(f".size()[{dimension}]")
        if is_size and number.is_number and number == fake.shape[dimension]:
            return _users_line(env.replacements_slocs.get(symbol))
    return ""


def _users_line(place: Any) -> str:
    """Such as "model.py:18: assert ids.shape[1] <= 100"."""
    code, _, where = str(getattr(place, "maybe_user_loc", None) or "").rpartition("  # ")
    file = where.split(" in ")[0].rpartition("/")[2]
    return f"{file}: {code}" if code else file


def size_hint(size: int | torch.SymInt) -> int:
    """The number that a symbolic size stands for (4096 if it has none)."""
    if isinstance(size, int):
        return size
    node, numbers = size.node, _sizes.get()
    if numbers is not None:
        key = (node.shape_env, node.expr)
        if key in numbers.known:
            return numbers.known[key]
        if node.expr.free_symbols & numbers.of_symbols.keys():
            as_traced = {symbol: sympy.Integer(n) for symbol, n in size_symbols(size).items()}
            expression = node.expr.xreplace({**as_traced, **numbers.of_symbols})
            if expression.is_number:
                numbers.known[key] = int(expression)
                return numbers.known[key]
    hint = getattr(node, "hint", None)
    if isinstance(hint, int):
        return hint
    shape_env = node.shape_env
    ask = getattr(shape_env, "optimization_hint", None)
    if ask is not None:
        return int(ask(node.expr, fallback=4096))
    return int(shape_env.size_hint(node.expr, allow_none=True) or 4096)
