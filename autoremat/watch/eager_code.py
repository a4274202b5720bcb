"""What code between the graphs of a step holds.

Enters: what the graphs are given, and what layers in eager mode have returned. Leaves: the
bytes that autograd and the user's code hold, other than what the plans count already. Guarantees:
each storage counts once.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autoremat import _torch
from autoremat.memory.storage_sizes import rounded_nbytes, same_device, storages_of, tensors_in
from autoremat.watch.ledger import run_of

NODES_OF_A_LOSS = 32  # that tell it from another
_KEY = "autoremat, saved"  # in the metadata of autograd's nodes


class Results:
    """Storages of what eager code has made in this step, as long as somebody holds them."""

    def __init__(self) -> None:
        """None yet."""
        self._found: dict[int, tuple[StorageWeakRef, int, torch.device]] = {}

    def __bool__(self) -> bool:
        """Whether there are any, held or not."""
        return bool(self._found)

    def clear(self) -> None:
        """A step begins."""
        self._found.clear()

    def note(self, results: Any) -> None:
        """Remember the tensors in a nest of results, without holding them."""
        for storage in (s for tensor in tensors_in(results) for s in storages_of(tensor)):
            # Fake ones are on `meta`: between buckets of DistributedDataParallel, nothing tells
            # those of the batch and of earlier buckets.
            found = (StorageWeakRef(storage), storage.nbytes(), storage.device)
            self._found[_torch.storage_identity(storage)] = found

    def add(self, other: Results) -> None:
        """Remember what others have noted."""
        self._found |= other._found

    def note_saved(self, values: Iterable[Any], device: torch.device) -> None:
        """Remember what code in eager mode has saved on the way to the tensors among these."""
        tensors = (value for value in values if isinstance(value, torch.Tensor))
        for node in _saving_behind((tensor.grad_fn for tensor in tensors), device):
            self.add(_results_saved_by(node, device))

    def note_inputs(self, inputs: Iterable[Any]) -> None:
        """Remember what code between the graphs made and gave to one of them.

        The graph's backward may hold it on, which counts for later graphs.
        """
        given = (value for value in inputs if isinstance(value, torch.Tensor))
        self.note([value for value in given if not _counts_elsewhere(value)])

    def held(self, device: torch.device) -> dict[int, int]:
        """Bytes of those on the device that are still held, by their identities."""
        return {
            identity: rounded_nbytes(nbytes, device)
            for identity, (storage, nbytes, place) in self._found.items()
            if same_device(place, device) and not storage.expired()
        }


def _results_saved_by(node: Any, device: torch.device) -> Results:
    """What of a node counts nowhere else: found once, as each later graph of a step comes by it."""
    key = f"{_KEY}, {device}"
    if key not in node.metadata:
        found = Results()
        found.note([value for value, _ in _saved_in_eager_mode(node, device, None)])
        node.metadata[key] = found
    results: Results = node.metadata[key]
    return results


def _saving_behind(starts: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Of the nodes from some on towards the inputs, those that lead to any that has saved anything.

    Each graph of a step comes by all before it: what leads to none is walked through once.
    """
    key = f"{_KEY}, behind, {device}"
    stack = [node for node in starts if node is not None]
    seen: set[Any] = set()
    while stack:
        node = stack.pop()
        is_empty = node.metadata.get(key)
        if is_empty is None:  # those behind it first
            sources = [source for source, _ in node.next_functions if source is not None]
            unknown = [source for source in sources if key not in source.metadata]
            if unknown:
                stack += [node, *unknown]
                continue
            is_empty = not _results_saved_by(node, device) and all(s.metadata[key] for s in sources)
            node.metadata[key] = is_empty
        if is_empty or node in seen:
            continue
        seen.add(node)
        yield node
        stack += [source for source, _ in node.next_functions if source is not None]


def held_nbytes(
    inputs: Iterable[Any], known: Collection[int], device: torch.device, results: Results
) -> int:
    """Bytes that the graphs' surroundings hold so far.

    Args:
        inputs: of the next graph; what they hold counts as handed in.
        known: identities of storages that count as resident.
        device: what is elsewhere does not count.
        results: of layers between the graphs; a caller may hold those that no graph is given.
    """
    given = [value for value in inputs if isinstance(value, torch.Tensor)]
    counted = {_torch.storage_identity(s) for value in given for s in storages_of(value)} | set(
        known
    )
    sizes = {key: size for key, size in results.held(device).items() if key not in counted}
    for node in nodes_behind(tensor.grad_fn for tensor in given):
        if not _torch.is_compiled_backward(node):  # what those hold is in the plans of their graphs
            sizes |= saved_storages(node, counted, device)
    return sum(sizes.values())


def saved_storages(
    node: Any,
    known: Collection[int],
    device: torch.device,
    *,
    only_held: bool = False,
    held_by: dict[int, list[torch.Tensor]] | None = None,
) -> dict[int, int]:
    """Bytes of what a node of eager code has saved for the backward, by the storages' identities.

    Args:
        node: of autograd's graph; of a planned graph, what code in eager mode made and gave to it
            is all that its plan does not count.
        known: identities of storages that count elsewhere.
        device: what is elsewhere does not count.
        only_held: only what Python code holds as well, as labels are: it outlives the backward.
        held_by: as of `_torch.checkpoint_inputs`, of nodes that are asked for one after the other.
    """
    found: dict[int, int] = {}
    for value, is_held in _saved_in_eager_mode(node, device, held_by):
        if is_held or not only_held:
            for storage in storages_of(value):
                identity = _torch.storage_identity(storage)
                if identity not in known:
                    found[identity] = rounded_nbytes(storage.nbytes(), device)
    return found


def _saved_in_eager_mode(
    node: Any, device: torch.device, held_by: dict[int, list[torch.Tensor]] | None
) -> Iterator[tuple[torch.Tensor, bool]]:
    """What of a node counts nowhere else, and whether Python code holds it as well."""
    run = run_of(node)
    is_planned = run is not None and bool(run.name)
    with _torch.real_execution():  # asked for a saved value, autograd makes a tensor of it
        inputs = ((value, False) for value in _torch.checkpoint_inputs(node, held_by))
        for value, is_held in (*_saved(node), *inputs):
            if not same_device(value.device, device) or _counts_elsewhere(value):
                continue
            if not is_planned or value.grad_fn is not None:
                yield value, is_held


def _saved(node: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    """What a node has saved, and whether Python code holds it, or what it is a view of, as well.

    A result of the node itself is saved as a tensor of its own, of which this cannot be seen.
    """
    unheld = _references_of_unheld()
    for value, references in _referred(node):
        most = unheld[_torch.base_of(value) is not value]
        yield value, references.to_value > most.to_value or references.to_base > most.to_base


class _References(NamedTuple):
    """How many Python holds to a tensor, and to what it is a view of."""

    to_value: int
    to_base: int


def _referred(node: Any) -> list[tuple[torch.Tensor, _References]]:
    """What a node has saved, each tensor once: what is listed twice would be held by the lists."""
    values = {id(value): value for value in tensors_in(_torch.saved_by(node))}
    counts: list[_References] = []
    for value in values.values():  # here: a call may hold its arguments, under Dynamo's frames more
        base = _torch.base_of(value)
        is_listed = base is not value and id(base) in values
        counts.append(_References(sys.getrefcount(value), sys.getrefcount(base) - is_listed))
    return list(zip(values.values(), counts, strict=True))


@functools.cache
def _references_of_unheld() -> tuple[_References, _References]:
    """To a saved tensor that nobody else holds: one that is no view, and one that is.

    Found by trying, as torch's releases differ in how a tensor holds its Python object.
    """
    nodes: list[Any] = []

    def save() -> None:
        leaf = torch.ones(1, requires_grad=True)
        nodes.extend((leaf * factor).grad_fn for factor in (torch.ones(1), torch.ones(2)[:1]))

    saver = threading.Thread(target=save)  # hooks and modes of the user's own are this thread's
    saver.start()
    saver.join()
    whole, view = (_referred(node)[0][1] for node in nodes)
    return whole, view


def nodes_behind(
    starts: Iterable[Any], is_end: Callable[[Any], bool] = lambda node: False
) -> Iterator[Any]:
    """Autograd's nodes from some on towards the inputs, each once.

    Args:
        starts: the first of them; None is left out.
        is_end: whether what is behind a node is left out.
    """
    stack: list[Any] = list(starts)
    seen: set[Any] = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if not is_end(node):
            stack.extend(source for source, _ in node.next_functions)


def names_from(starts: Iterable[Any]) -> tuple[str, ...]:
    """What tells autograd's graphs apart: the operations next to where they are entered.

    None behind a compiled graph, whose run says more: Python's objects of its edges, one for each
    parameter, would set off a garbage collection.
    """
    nodes = nodes_behind(starts, _torch.is_compiled_backward)
    return tuple(type(node).__name__ for node in itertools.islice(nodes, NODES_OF_A_LOSS))


def _counts_elsewhere(value: torch.Tensor) -> bool:
    """Whether it is a parameter, or what a planned graph returned."""
    base = _torch.base_of(value)
    is_parameter = base.is_leaf and base.requires_grad
    return is_parameter or _torch.is_compiled_backward(base.grad_fn)
