"""Figures that do not depend on the rank that measured them.

Enters: figures that were measured or looked up here, by keys that name the machine. Leaves: those
that count for every rank of the job, where there is one: on other machines, too. Guarantees: those
of `ranks.figures`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autoremat.ranks.figures import Figures, known_figures, settled

ON_MACHINE = "|on "
"""In a key, before what names the machine."""


def agreed(keys: Iterable[str], kind: type[Figures]) -> dict[str, Figures]:
    """By key, what counts for the ranks of this job already."""
    shared = {key: _shared(key) for key in keys}
    found = known_figures(shared.values(), kind)
    return {key: found[name] for key, name in shared.items() if name in found}


def agree(figures: Mapping[str, Figures], kind: type[Figures]) -> dict[str, Figures]:
    """By key, what counts for the ranks of this job from now on."""
    counting = settled({_shared(key): found for key, found in figures.items()}, kind)
    return {key: counting[_shared(key)] for key in figures}


def _shared(key: str) -> str:
    return key.rpartition(ON_MACHINE)[0] or key
