"""Figures that count for all ranks of a job: the first that one of them has stored.

Enters: by key, what this rank has measured or found. Leaves: by key, what counts. Guarantees:
nobody waits for another rank, whenever it comes and whatever it knows already; ranks that ask for
the same key get the same figures, on all hosts. Without a job, or with a store that fails, this
rank's own count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import astuple
from typing import Any, TypeVar

from autoremat.ranks.store import leave_store, shared_store

Figures = TypeVar("Figures")
"""A dataclass of numbers, texts and lists of them."""

_ABSENT = "-"  # expected of a key that no rank has stored: the store hands it back


def known_figures(keys: Iterable[str], kind: type[Figures]) -> dict[str, Figures]:
    """Those that ranks have stored so far, all of one kind."""
    rows = _exchanged(kind, dict.fromkeys(keys, _ABSENT), expected=_ABSENT)
    return {key: kind(*json.loads(row)) for key, row in rows.items() if row != _ABSENT}


def settled(figures: Mapping[str, Figures], kind: type[Figures]) -> dict[str, Figures]:
    """What counts for the same keys: these figures, where no other rank was first."""
    own = {key: json.dumps(astuple(found)) for key, found in figures.items()}  # type: ignore[call-overload]
    rows = own | _exchanged(kind, own, expected="")
    return {key: kind(*json.loads(row)) for key, row in rows.items()}


def _exchanged(kind: type[Any], rows: Mapping[str, str], *, expected: str) -> dict[str, str]:
    """What the store holds for each key after it was to change from what is expected to the row."""
    store = shared_store()
    found: dict[str, str] = {}
    if store is None:
        return found
    try:
        for key, row in rows.items():
            place = f"{kind.__name__}/{hashlib.sha256(key.encode()).hexdigest()}"
            found[key] = store.compare_set(place, expected, row).decode()
    except RuntimeError as error:
        leave_store(error)
    return found
