"""Questions that were answered before: by a rank of the job, or by a process on this machine.

Enters: a question in words, which says all that its answer depends on, and a search. Leaves: the
answer. Guarantees: nobody waits for another rank; ranks that ask the same get the same answer,
however much time load or a late start has left to each search; a later process on this machine
does not search again while device, settings, torch and this package are what they were.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import autoremat_solver
import torch

from autoremat import _torch
from autoremat.cost.machine import settings_key
from autoremat.kept import Kept
from autoremat.ranks.figures import known_figures, settled

Answer = TypeVar("Answer")
"""A dataclass of numbers, texts and lists of them."""


class FoundBefore(Kept):
    """Answers to questions about plans."""

    FILE, WHAT = "plans.sqlite3", "answers of searches and readings"
    FORMAT = 2


def answer(
    question: str,
    kind: type[Answer],
    search: Callable[[], Answer],
    device: torch.device,
    *,
    is_worth_keeping: Callable[[Answer], bool] = lambda _: True,
) -> Answer:
    """What a rank of the job has found, or a process before this one; else what a search finds.

    Args:
        question: says all that the answer depends on, but for what is the same in this process.
        kind: of the answer.
        search: finds one.
        device: where the graph runs.
        is_worth_keeping: whether a later process is spared a search of its own.
    """
    known = known_figures([question], kind)
    if known:
        return known[question]
    kept = functools.partial(_kept, question, kind, search, device, is_worth_keeping)
    found = search() if _torch.caches_are_off() else kept()
    return settled({question: found}, kind)[question]


def _kept(
    question: str,
    kind: type[Answer],
    search: Callable[[], Answer],
    device: torch.device,
    is_worth_keeping: Callable[[Answer], bool],
) -> Answer:
    """What a process on this machine has found before, or what is found now, for later ones."""
    text = f"{kind.__name__}|{question}|{settings_key(device)}|{_torch.inductor_settings()}"
    key = hashlib.sha256(f"{text}|{code_key()}".encode()).hexdigest()
    with FoundBefore.open() as before:
        found = before.read([key], kind).get(key)
    if found is None:
        found = search()
        if is_worth_keeping(found):
            with FoundBefore.open() as kept:
                kept.write({key: found})
    return found


@functools.cache
def code_key() -> str:
    """The code of this package and of the solver: a search that was changed may find better."""
    folders = (Path(__file__).parents[1], Path(autoremat_solver.__file__).parent)
    sources = sorted(path for folder in folders for path in folder.rglob("*.py"))
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()
