"""What code in eager mode saves in checkpoints, known before they run again.

Enters: autograd's nodes as a backward begins. Leaves: for each node in a checkpoint that is not
reentrant, what it will hold once its region runs again. Guarantees: no rerun is taken that torch
would not take; a region holds what the first rerun of one alike was measured to hold.

Until a region has run again there is nothing of it to see but shapes: two of them may be one
tensor, and one may be a parameter. So a rerun is looked at as it ends, for the next step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autoremat import _torch
from autoremat.memory.meter import rounded_nbytes, same_device, storages_of, tensors_in
from autoremat.watch.eager_code import Results

Remade = Mapping[int, Mapping[int, int]]
"""What a node will hold once regions run again: by region, bytes by a number of the storage."""


@dataclass
class _Region:
    """The nodes of a checkpoint, and the ids of their holders."""

    checkpoint: _torch.Checkpoint
    holders: defaultdict[Any, list[int]] = field(default_factory=lambda: defaultdict(list))


_Layout = list[dict[int, int]]  # by tensor: bytes of its storages by their numbers


class Reruns:
    """Of one session's steps."""

    def __init__(self) -> None:
        """Nothing is known."""
        self._layouts: dict[tuple[str, str], _Layout] = {}
        self._by_graphs, self._to_graphs = Results(), Results()  # in reruns that are looked at
        self._looks = 0  # at reruns to come

    def of(
        self,
        nodes: Iterable[Any],
        planned: Collection[Any],
        device: torch.device,
        find_known: Callable[[], Collection[int]],
    ) -> Mapping[Any, Remade]:
        """What each of these nodes will hold, as far as reruns so far have shown it.

        Args:
            nodes: of autograd's graph.
            planned: those of them that belong to planned graphs, of which plans tell.
            device: what is elsewhere does not count.
            find_known: finds identities of storages that count elsewhere.
        """
        regions: dict[int, _Region] = {}
        for node in nodes:
            for checkpoint, holder in _torch.checkpoints_of(node):
                region = regions.setdefault(checkpoint.region, _Region(checkpoint))
                region.holders[node].append(holder)
        found: defaultdict[Any, dict[int, dict[int, int]]] = defaultdict(dict)
        first = 0
        for region in regions.values():
            if region.holders.keys() <= set(planned):
                continue
            kind = (region.checkpoint.kind, str(device))
            layout = self._layouts.get(kind)
            if layout is None:
                self._look_at_rerun(region, planned, device, kind, find_known)
                continue
            numbers = region.checkpoint.numbers()
            for node, holders in region.holders.items():
                entries = [layout[numbers[holder]] for holder in holders if holder in numbers]
                sizes = {first + n: size for entry in entries for n, size in entry.items()}
                if sizes:
                    found[node][region.checkpoint.region] = sizes
            first += len(layout)
        return found

    def note_graph(self, args: Any, run: Callable[[], Any]) -> Any:
        """A planned graph runs in a rerun: what it makes is in its plan, what it is given is not.

        Its run may not end: torch leaves the rerun as soon as it has enough.
        """
        if self._looks:
            self._to_graphs.note(args)
        results = run()
        if self._looks:
            self._by_graphs.note(results)
        return results

    def _look_at_rerun(
        self,
        region: _Region,
        planned: Collection[Any],
        device: torch.device,
        kind: tuple[str, str],
        find_known: Callable[[], Collection[int]],
    ) -> None:
        """Learn what a region holds as soon as it has run again."""
        numbers = region.checkpoint.numbers()
        by_plans = {
            numbers[holder]
            for node, holders in region.holders.items()
            for holder in (holders if node in planned else ())
            if holder in numbers
        }
        self._looks += 1

        def note(inputs: Sequence[Any], tensors: list[torch.Tensor | None]) -> None:
            counted = _storages([tensors[number] for number in by_plans])
            counted -= self._to_graphs.held(device).keys()  # those of code in eager mode
            counted |= {*_storages(inputs), *find_known(), *self._by_graphs.held(device)}
            self._layouts[kind] = _layout(tensors, counted, device)
            self._looks -= 1
            if not self._looks:
                self._by_graphs.clear()
                self._to_graphs.clear()

        region.checkpoint.after_rerun(note)


def _storages(values: Any) -> set[int]:
    """Identities of those behind the tensors in a nest of values."""
    storages = (storage for tensor in tensors_in(values) for storage in storages_of(tensor))
    return set(map(_torch.storage_identity, storages))


def _layout(
    tensors: Iterable[torch.Tensor | None], counted: Collection[int], device: torch.device
) -> _Layout:
    """Which of a region's tensors share a storage, and what each takes."""
    numbers: dict[int, int] = {}
    found: _Layout = []
    for tensor in tensors:
        is_here = tensor is not None and same_device(tensor.device, device)
        storages = storages_of(tensor) if tensor is not None and is_here else []
        apart = {_torch.storage_identity(s): s.nbytes() for s in storages}
        found.append(
            {
                numbers.setdefault(key, len(numbers)): rounded_nbytes(nbytes, device)
                for key, nbytes in apart.items()
                if key not in counted
            }
        )
    return found
