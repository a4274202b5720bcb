"""What a compiled graph asks of the device's allocator, forward and backward in one numbering.

Enters: the wrappers of both, read, and how what crosses between them is named. Leaves: pairs of a
block and its bytes, 0 where it is freed, as `reserved.step.GraphEvents` takes them. Guarantees:
what is live after the backward is returned by one of the two, or held by the caller.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from autoremat.inductor.wrapper import WrapperMemory

_LATER = 1 << 32  # from here on blocks of the backward are numbered


@dataclass(frozen=True)
class Allocations:
    """Of one step.

    Attributes:
        forward: pairs of a block and its bytes, in the order of the events.
        backward: the same; gradients that come in are allocated first.
        gradients: blocks that the backward returns.
    """

    forward: list[list[int]] = field(default_factory=list)
    backward: list[list[int]] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)


def allocations_of(
    first: WrapperMemory,
    second: WrapperMemory,
    *,
    held: Mapping[int, int],
    given: Iterable[tuple[int, int] | None],
) -> Allocations:
    """What both ask for.

    Args:
        first: the forward's wrapper.
        second: the backward's.
        held: what lives until the step's end, with its bytes: storages of the forward's outputs,
            and below zero gradients that come in and that somebody holds.
        given: of each input of the backward that it owns, its storage by the forward's numbers,
            or one below zero for a gradient that comes in, and its bytes.
    """
    given = tuple(given)
    crossing = {found[0] for found in given if found is not None and found[0] >= 0}
    forward = [list(event) for event in first.events]
    forward += _frees(_live(forward).keys() - crossing - held.keys(), forward)
    incoming = {found[0]: found[1] for found in given if found is not None and found[0] < 0}
    incoming |= {key: nbytes for key, nbytes in held.items() if key < 0}
    renamed = _renamed(second, given)
    backward = [[key, nbytes] for key, nbytes in incoming.items() if nbytes]
    backward += [[renamed.get(key, _LATER + key), nbytes] for key, nbytes in second.events]
    # Without code, inputs are handed through by the names that they were given.
    others = {key: key if not second.inputs else _LATER + key for key, _ in _results(second)}
    gradients = sorted({renamed.get(key, others[key]) for key, _ in _results(second)})
    kept = {key for key in held if key >= 0}.union(gradients)
    backward += _frees(_live([*forward, *backward]).keys() - kept, [*forward, *backward])
    live = _live([*forward, *backward])
    return Allocations(forward, backward, [key for key in gradients if key in live])


def _renamed(second: WrapperMemory, given: tuple[tuple[int, int] | None, ...]) -> dict[int, int]:
    """The backward's own numbers of its inputs, and the forward's."""
    pairs = zip(second.inputs, given, strict=False)
    return {own: found[0] for own, found in pairs if own is not None and found is not None}


def _results(memory: WrapperMemory) -> list[tuple[int, int]]:
    return [found for found in memory.returned if found is not None]


def _live(events: Iterable[list[int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for block, nbytes in events:
        if nbytes:
            found[block] = nbytes
        else:
            found.pop(block, None)
    return found


def _frees(blocks: Collection[int], events: list[list[int]]) -> list[list[int]]:
    """Frees of blocks, in the order in which they were allocated."""
    return [[block, 0] for block in _live(events) if block in blocks]
