"""What operators allocate while they run, counted operator by operator.

Enters: a device. Leaves: a context that counts. Guarantees: what exists before counts as nothing,
also where an operator returns a view of it; values are not changed. What an operator takes for
itself is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from autoremat._torch import TorchDispatchMode, is_mutable, storage_identity, tensor_leaves
from autoremat.memory.storage_sizes import rounded_nbytes, storage_identities, storages_of


@dataclass(eq=False)
class LiveStorages(TorchDispatchMode):
    """Counts the bytes of storages that operators create, until they are freed.

    Attributes:
        device: what is elsewhere does not count.
        ignores_given: whether what operators are given existed before, where it is not known.
        live_nbytes: created and not freed yet.
        live: the same by storage.
        peak_nbytes: the most that were live.
        has_changed_any: whether an operator that writes was given one of the watched tensors.
        events: given if they are wanted: each storage's number and its bytes, or 0 as it is freed.
        counts: whether operators still count.
    """

    supports_higher_order_operators = True

    device: torch.device
    ignores_given: bool = False
    live_nbytes: int = 0
    live: dict[int, int] = field(default_factory=dict)
    peak_nbytes: int = 0
    has_changed_any: bool = False
    events: list[tuple[int, int]] | None = None
    counts: bool = True
    _number: int = 0  # of storages so far
    _seen: set[int] = field(default_factory=set)
    _watched: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Prepare the mode."""
        super().__init__()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether code is compiled and runs under it as it would without."""
        return True

    def ignore(self, tensor: torch.Tensor) -> None:
        """Leave out what existed before: a tensor's storages, and those of its gradient."""
        self._seen.update(storage_identities([tensor]))
        if tensor.grad is not None:
            self.ignore(tensor.grad)

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """See whether an operator changes one of the tensors."""
        self._watched.update(storage_identities(tensors))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run an operator, and note what it makes."""
        if not self.counts:
            return func(*args, **(kwargs or {}))
        given = tensor_leaves((args, kwargs))
        # Only now: when one of them is gone, another storage may have its identity.
        existed = storage_identities(given) if self.ignores_given else frozenset[int]()
        result = func(*args, **(kwargs or {}))
        if self._watched and not self.has_changed_any and is_mutable(func):
            self.has_changed_any = not self._watched.isdisjoint(storage_identities(given))
        for tensor in tensor_leaves(result):
            if tensor.device.type == self.device.type:
                for storage in storages_of(tensor):
                    if storage_identity(storage) not in existed:
                        self._track(storage)
        return result

    def _track(self, storage: torch.UntypedStorage) -> None:
        identity = storage_identity(storage)
        if identity in self._seen:
            return
        nbytes = rounded_nbytes(storage.nbytes(), self.device)
        self._seen.add(identity)
        self.live_nbytes += nbytes
        self.live[identity] = nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes)
        self._number += 1
        self._note(self._number, nbytes)
        given = (identity, self._number, nbytes)
        weakref.finalize(storage, self._freed, *given).atexit = False

    def _freed(self, identity: int, number: int, nbytes: int) -> None:
        self._seen.discard(identity)
        self.live_nbytes -= nbytes
        self.live.pop(identity, None)
        self._note(number, 0)

    def _note(self, number: int, nbytes: int) -> None:
        if self.events is not None:
            self.events.append((number, nbytes))
