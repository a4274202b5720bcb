"""The job's key-value store, as long as it answers.

Enters: the store at which `torch.distributed` has let the ranks meet. Leaves: a part of it that is
ours. Guarantees: no collective is run, so nothing here can mix with those of the model; a store
that fails is told of once and left alone from then on.
"""

from __future__ import annotations

import warnings
from typing import Any

from autoremat import _torch
from autoremat.call_stack import users_level

_failed: Any = None  # the store that did not answer


def shared_store() -> Any | None:
    """The part of the job's store that is ours (a `Store`); None if there is none that answers."""
    store = _torch.job_store()
    if store is None or store is _failed:
        return None
    return _torch.part_of_store(store, "autoremat")


def leave_store(error: Exception) -> None:
    """The store has failed: each rank goes on by itself."""
    global _failed
    _failed = _torch.job_store()
    warnings.warn(
        "autoremat: the key-value store of this job's process group does not answer "
        f"({type(error).__name__}: {error}). This rank plans with its own figures, and its plan "
        "may differ from that of others. Is the process that holds the store, as a rule that of "
        "rank 0, still there?",
        stacklevel=users_level(),
    )
