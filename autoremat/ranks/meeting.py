"""A meeting of ranks: each says something once, and all hear the same conclusion.

Enters: ranks that come to their meetings in the same order, each with a text. Leaves: what one of
them concludes from all the texts. Guarantees: no collective, so it may stand anywhere between those
of the model; nobody waits longer than the process group's timeout for a rank, and who did not come
is named.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import distributed

from autoremat.errors import RankError
from autoremat.ranks.store import leave_store, shared_store

_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05  # between looks at the store
_CONCLUDING_S = 10.0  # for the rank that concludes, once it has all or waits no longer


def meet(
    ranks: Sequence[int], said: str, conclude: Callable[[Mapping[int, str]], str]
) -> str | None:
    """What the first of the ranks concludes from what each has said.

    Args:
        ranks: who meets; this one is among them.
        said: by this rank.
        conclude: given what each rank said; it may not raise.

    Returns:
        None if the store has failed: then each rank is on its own.

    Raises:
        RankError: naming who did not come.
    """
    store = shared_store()
    if store is None:
        return None
    try:
        silent, concluded = _Meeting(store, ranks).attend(said, conclude)
    except RuntimeError as error:
        leave_store(error)
        return None
    if silent:
        raise RankError(
            tuple(silent),
            f"did not come within {store.timeout.total_seconds():g} s to where the ranks agree on "
            "the plan of their first training step. Has its process ended, or does it not train "
            "this model?",
        )
    return concluded


def place_of(ranks: Sequence[int]) -> str:
    """Where the meetings of these ranks are kept: all keys of the store begin with it."""
    return f"meetings/{hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()}"


class _Meeting:
    """The next one of these ranks."""

    def __init__(self, store: Any, ranks: Sequence[int]) -> None:
        self._store = store
        self._ranks = ranks
        self._own = distributed.get_rank()
        place = place_of(ranks)
        # Counted where the meetings are kept: the store may outlive a process group.
        number = store.add(f"{place}/{self._own}", 1)
        self._place = f"{place}/{number}"

    def attend(
        self, said: str, conclude: Callable[[Mapping[int, str]], str]
    ) -> tuple[list[int], str]:
        """Who did not come, and the conclusion."""
        self._store.set(self._key(self._own), said)
        leader = self._ranks[0]
        silent = self._silent(self._ranks if self._own == leader else [leader])
        if self._own == leader:
            texts = {} if silent else {rank: self._read(rank) for rank in self._ranks}
            concluded = "" if silent else conclude(texts)
            self._store.set(self._key("all"), json.dumps([silent, concluded]))
        elif silent or not self._comes([self._key("all")], _CONCLUDING_S):
            return [leader], ""
        silent, concluded = json.loads(self._read("all"))
        return silent, concluded

    def _silent(self, ranks: Sequence[int]) -> list[int]:
        """Who of the ranks does not come."""
        keys = {rank: self._key(rank) for rank in ranks}
        if self._comes(list(keys.values())):
            return []
        return [rank for rank, key in keys.items() if not self._store.check([key])]

    def _comes(self, keys: list[str], more_s: float = 0.0) -> bool:
        """Whether all keys are there in time. Waiting in the store would keep it from others."""
        deadline = time.monotonic() + self._store.timeout.total_seconds() + more_s
        pause_s = _PAUSE_S
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True

    def _key(self, who: int | str) -> str:
        return f"{self._place}/{who}"

    def _read(self, who: int | str) -> str:
        text: str = self._store.get(self._key(who)).decode()
        return text
