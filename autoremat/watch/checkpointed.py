"""What code in eager mode saves in checkpoints, known before they run again.

Enters: autograd's nodes as a backward begins. Leaves: for each node in a checkpoint that is not
reentrant, what it will hold once its region runs again. Guarantees: no rerun is taken that torch
would not take; a region holds what the first rerun of one alike was measured to hold; what goes
wrong in a look ends no backward, and is raised where the next one is asked for.

Until a region has run again there is nothing of it to see but shapes: two of them may be one
tensor, and one may be a parameter. So a rerun is looked at as it ends, for the next step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from autoremat import _torch
from autoremat.memory.live_storages import LiveStorages
from autoremat.memory.storage_sizes import storage_identities, storage_sizes, tensors_in
from autoremat.watch.eager_code import Results

Remade = Mapping[int, Mapping[Hashable, int]]
"""What a node will hold once regions run again: by region, bytes by what tells storages apart."""


class Again(NamedTuple):
    """What reruns will make.

    Attributes:
        remade: what each node will hold; under None what others will hold, which the backward does
            not reach: it stays.
        passing_nbytes: by region, what its rerun takes for a moment beside that.
        is_complete: whether reruns so far have shown all of it.
    """

    remade: Mapping[Any, Remade] = {}
    passing_nbytes: Mapping[int, int] = {}
    is_complete: bool = True


@dataclass
class _Region:
    """A checkpoint that waits.

    Attributes:
        checkpoint: which one.
        numbers: of what it makes again and somebody waits for, by what stands in its place.
        by_node: of these, what it makes again for each of its nodes.
        going_in: of these, what checkpoints within it run again on.
    """

    checkpoint: _torch.Checkpoint
    numbers: Mapping[int, int]
    by_node: defaultdict[Any, list[int]] = field(default_factory=lambda: defaultdict(list))
    going_in: set[int] = field(default_factory=set)

    @property
    def unreached(self) -> list[int]:
        """Numbers of what it makes again for nodes that this backward does not reach."""
        reached = {n for numbers in self.by_node.values() for n in numbers}
        return sorted(set(self.numbers.values()) - reached)

    def kind(self, planned: Collection[Any], device: torch.device) -> Hashable:
        """What tells it from others: a checkpoint that checks nothing knows no shapes."""
        nodes = [
            (node.name(), node in planned, *_torch.gradient_nbytes_into(node), *numbers)
            for node, numbers in self.by_node.items()
        ]
        return str(device), self.checkpoint.shapes, *self.unreached, *nodes

    def saved_by(self, planned: Collection[Any]) -> set[int]:
        """Numbers of what nodes of planned graphs have saved."""
        found = {n for node, numbers in self.by_node.items() if node in planned for n in numbers}
        return found - self.going_in


_Layout = list[dict[int, int]]  # by tensor: bytes of its storages by their numbers


class Reruns:
    """Of one session's steps."""

    def __init__(self) -> None:
        """Nothing is known."""
        self._layouts: dict[Hashable, _Layout] = {}
        self._passing_nbytes: dict[Hashable, int] = {}  # the same of `Again`
        self._looks = 0  # at reruns that go on
        self._graphs_run = 0  # in reruns so far
        self._defect: Exception | None = None  # of the latest look, until it is told
        self._by_graphs, self._to_graphs = Results(), Results()  # in these

    def of(
        self,
        nodes: Iterable[Any],
        planned: Collection[Any],
        device: torch.device,
        find_known: Callable[[], Collection[int]],
    ) -> Again:
        """What reruns will make for each of these nodes.

        Args:
            nodes: of autograd's graph.
            planned: those of them that belong to planned graphs, of which plans tell.
            device: what is elsewhere does not count.
            find_known: finds identities of storages that count elsewhere.

        Raises:
            Exception: what went wrong in a look at a rerun since this was asked last; that look
                was in the middle of a backward, and has shown nothing.
        """
        if self._defect is not None:
            defect, self._defect = self._defect, None
            raise defect
        regions = _regions_of(nodes)
        found: defaultdict[Any, dict[int, dict[Hashable, int]]] = defaultdict(dict)
        passing_nbytes: dict[int, int] = {}
        is_complete = True
        for number, region in regions.items():
            is_of_graphs = all(node in planned for node in region.by_node)
            if is_of_graphs and not region.going_in and not region.unreached:
                continue
            kind = region.kind(planned, device)
            layout = self._layouts.get(kind)
            if layout is None:
                is_complete = False
                self._look_at_rerun(region, planned, device, kind, find_known)
                continue
            passing_nbytes[number] = self._passing_nbytes.get(kind, 0)
            for node, numbers in (*region.by_node.items(), (None, region.unreached)):
                entries = [layout[n] for n in numbers]
                sizes: dict[Hashable, int] = {}
                for entry in entries:
                    sizes |= {(number, n): nbytes for n, nbytes in entry.items()}
                if sizes:
                    found[node][number] = sizes
        return Again(found, passing_nbytes, is_complete)

    def run_graph(self, args: Any, run: Callable[[], Any]) -> Any:
        """Run a planned graph in a rerun: what it makes is in its plan, what it is given is not.

        Its run may not end: torch leaves the rerun as soon as it has enough.
        """
        if self._looks:
            self._to_graphs.note(args)
        self._graphs_run += 1
        results = run()
        if self._looks:
            self._by_graphs.note(results)
        return results

    def _look_at_rerun(
        self,
        region: _Region,
        planned: Collection[Any],
        device: torch.device,
        kind: Hashable,
        find_known: Callable[[], Collection[int]],
    ) -> None:
        """Learn what a region holds as soon as it has run again."""
        by_plans, going_in = region.saved_by(planned), region.going_in  # no look holds the region

        given = Results()  # a policy may have kept some of it, which is gone when nobody saves it
        made, before = LiveStorages(device, ignores_given=True), self._graphs_run

        def begin(inputs: Sequence[Any]) -> None:
            self._looks += 1
            try:
                given.note(inputs)
                made.__enter__()
            except Exception as error:
                self._note(error)

        def end(tensors: list[torch.Tensor | None] | None) -> None:
            self._looks -= 1
            try:
                made.__exit__(None, None, None)
                if tensors is not None:
                    counted = _identities([tensors[number] for number in by_plans])
                    counted -= self._to_graphs.held(device).keys()  # those of code in eager mode
                    inner = _identities([tensors[number] for number in going_in])
                    counted |= self._by_graphs.held(device).keys() - inner
                    counted |= {*given.held(device), *find_known()}
                    layout = self._layouts[kind] = _layout(tensors, counted, device)
                    if self._graphs_run == before:  # plans tell what theirs take
                        self._passing_nbytes[kind] = _passing_nbytes(layout, made.peak_nbytes)
            except Exception as error:
                self._note(error)
            if not self._looks:
                self._by_graphs.clear()
                self._to_graphs.clear()

        region.checkpoint.watch_rerun(begin, end)

    def _note(self, defect: Exception) -> None:
        """What a look did wrong, without the frames that hold tensors: the backward goes on."""
        defect.__context__ = defect.__cause__ = None
        self._defect = defect.with_traceback(None)


def _regions_of(nodes: Iterable[Any]) -> dict[int, _Region]:
    """The checkpoints that nodes are in, by what identifies them."""
    regions: dict[int, _Region] = {}
    for node in nodes:
        for checkpoint, holder, goes_in in _torch.checkpoints_of(node):
            if checkpoint.region not in regions:
                regions[checkpoint.region] = _Region(checkpoint, checkpoint.numbers())
            region = regions[checkpoint.region]
            number = region.numbers[holder]
            region.by_node[node].append(number)
            region.going_in |= {number} if goes_in else set()
    return regions


def _identities(values: Any) -> set[int]:
    """Of the storages behind the tensors in a nest of values."""
    return set(storage_identities(tensors_in(values)))


def _passing_nbytes(layout: _Layout, peak_nbytes: int) -> int:
    """Of what a rerun has taken at most, what it does not leave."""
    left: dict[int, int] = {}
    for entry in layout:
        left |= entry
    return max(0, peak_nbytes - sum(left.values()))


def _layout(
    tensors: Iterable[torch.Tensor | None], counted: Collection[int], device: torch.device
) -> _Layout:
    """Which of a region's tensors share a storage, and what each takes."""
    numbers: dict[int, int] = {}
    found: _Layout = []
    for tensor in tensors:
        sizes = {} if tensor is None else storage_sizes([tensor], device)
        own = {key: nbytes for key, nbytes in sizes.items() if key not in counted}
        found.append({numbers.setdefault(key, len(numbers)): n for key, n in own.items()})
    return found
