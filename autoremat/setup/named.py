"""Modules and parameters by pattern.

Enters: patterns and the names that a model has. Leaves: the names that match. Guarantees: each
pattern matches something, or is refused with names near to it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase


def matching(
    keyword: str, patterns: Iterable[str], names: Sequence[str], *, what: str
) -> list[str]:
    """The names that any pattern matches, in their order.

    Args:
        keyword: of the argument, for the error.
        patterns: such as "*.q_proj", "model.layers.0.*" or the ending "q_proj".
        names: paths of modules or parameters.
        what: they are, for the error.

    Raises:
        ValueError: if a pattern matches none; it names those near to it.
    """
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if _matches(name, pattern)}
        if not matched:
            raise ValueError(f"{keyword}={pattern!r} matches no {what}.{_near(pattern, names)}")
        found |= matched
    return [name for name in names if name in found]


def _matches(path: str, pattern: str) -> bool:
    """Whether a path matches: as a whole, or its end where the pattern has no wildcard.

    "*.attn.*" matches "layers.0.attn" itself too, as in `save=` and `recompute=`.
    """
    if any(fnmatchcase(form, pattern) for form in (path, f"{path}.", f".{path}", f".{path}.")):
        return True
    return not set("*?[").intersection(pattern) and path.endswith(f".{pattern}")


def _near(pattern: str, names: Sequence[str]) -> str:
    """Names that were perhaps meant: of equal layers only those of the first."""
    first = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".0", name) for name in names)
    known = [name for name in first if name in set(names)] or list(names)
    ends = {name.rpartition(".")[2]: name for name in reversed(known)}
    plain = pattern.strip("*.")
    near = [ends[end] for end in difflib.get_close_matches(plain, list(ends), n=2, cutoff=0.6)]
    near += difflib.get_close_matches(plain, known, n=4, cutoff=0.4) or known[:4]
    listed = ", ".join(f'"{name}"' for name in list(dict.fromkeys(near))[:4])
    return f" Near it: {listed}." if listed else ""
