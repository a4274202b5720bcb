"""A training step as the caching allocator sees it: what is asked of it and what comes back.

Enters: sizes of what lives all the time, and each compiled graph's and the optimizer's events.
Leaves: the events of several steps in their order. What the loop around them does is as most do:
the batch is replaced before the old one is gone, gradients are set to None before the forward (or
kept, and added to as the backward of each graph ends), the optimizer creates its state in its first
step, and what the forward returned lives until the step's end. Where gradients are kept, a batch is
one of those that add to them: the first one's, which makes them among its activations, is left out.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

STEPS = 4  # of a replay: the first creates state, the second is the first beside it


class Event(NamedTuple):
    """Something is allocated, or freed.

    Attributes:
        block: which; a name that is the same at both times.
        nbytes: that are asked for; 0 where it is freed.
    """

    block: Hashable
    nbytes: int


@dataclass(frozen=True)
class GraphEvents:
    """What a compiled graph allocates and frees in one step.

    Attributes:
        forward: events in their order; what is live after them crosses to the backward, or is the
            caller's.
        backward: the same.
        gradients: blocks that the backward returns; what else is live then are the outputs.
    """

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    gradients: frozenset[Hashable] = frozenset()

    @classmethod
    def of(
        cls,
        forward: Iterable[Sequence[int]],
        backward: Iterable[Sequence[int]],
        gradients: Iterable[int],
    ) -> GraphEvents:
        """From pairs of a block and its bytes, as files keep them."""
        first, second = (
            tuple(Event(block, nbytes) for block, nbytes in events)
            for events in (forward, backward)
        )
        return cls(first, second, frozenset(gradients))


@dataclass(frozen=True)
class Update:
    """What the optimizer allocates and frees in a step; what it does not free is its state.

    Attributes:
        first: in the first step.
        later: in those after it.
    """

    first: tuple[Event, ...] = ()
    later: tuple[Event, ...] = ()

    def in_step(self, step: int) -> Iterator[Event]:
        """Of the step with this number, by names that are unique in all steps.

        State that is made anew in each step takes the place of what the step before has made: of
        what the first step has made, then, in this order, of what the later ones leave.
        """
        if not step:
            yield from _named(("update", 0), self.first)
            return
        own = {block for block, nbytes in self.later if nbytes}
        replaced = dict.fromkeys(block for block, _ in self.later if block not in own)
        before = dict(zip(replaced, _live(self.later), strict=False))
        for block, nbytes in self.later:
            if block in own:
                yield Event(("update", step, block), nbytes)
            elif step == 1:
                yield Event(("update", 0, block), nbytes)
            elif block in before:
                yield Event(("update", step - 1, before[block]), nbytes)


@dataclass(frozen=True)
class StepMemory:
    """All that a step allocates.

    Attributes:
        before: bytes of each tensor that exists before the first step and stays: parameters,
            buffers, state.
        gradients: of each gradient that exists before it. If there is any, gradients are kept
            between steps and added to; else they are set to None.
        batch: of each tensor of a batch.
        libraries: what libraries keep, from the first forward on.
        graphs: compiled graphs, in the order of their forwards; backwards go the other way round.
        update: the optimizer's step.
    """

    before: tuple[int, ...]
    batch: tuple[int, ...]
    graphs: tuple[GraphEvents, ...]
    gradients: tuple[int, ...] = ()
    libraries: tuple[int, ...] = ()
    update: Update = field(default_factory=Update)

    def events(self, steps: int = STEPS) -> Iterator[Event]:
        """Of so many steps, one after the other."""
        yield from _allocated("before", (*self.before, *self.gradients))
        gradients: list[Hashable] = []
        for step in range(steps):
            yield from _freed(gradients)  # set to None, as the step begins
            yield from _allocated(("batch", step), self.batch)
            if step:
                yield from _freed(("batch", step - 1, n) for n in range(len(self.batch)))
            else:
                yield from _allocated("libraries", self.libraries)
            outputs, gradients = yield from self._passes(step)
            yield from self.update.in_step(step)
            yield from _freed(outputs)

    def _passes(self, step: int) -> Generator[Event, None, tuple[list[Hashable], list[Hashable]]]:
        """Forwards and backwards; returns what is live then: outputs, and new gradients."""
        outputs: list[Hashable] = []
        gradients: list[Hashable] = []
        for number, graph in enumerate(self.graphs):
            yield from _named((step, number), graph.forward)
        for number, graph in reversed(list(enumerate(self.graphs))):
            yield from _named((step, number), graph.backward)
            left = _live([*graph.forward, *graph.backward])
            outputs += [(step, number, block) for block in left if block not in graph.gradients]
            made = [(step, number, block) for block in left if block in graph.gradients]
            if self.gradients:
                yield from _freed(made)  # added to those that exist
            else:
                gradients += made
        return outputs, gradients


def _allocated(name: Hashable, sizes: Iterable[int]) -> Iterator[Event]:
    key = name if isinstance(name, tuple) else (name,)
    return (Event((*key, n), nbytes) for n, nbytes in enumerate(sizes) if nbytes)


def _freed(blocks: Iterable[Hashable]) -> Iterator[Event]:
    return (Event(block, 0) for block in blocks)


def _named(name: tuple[Hashable, ...], events: Iterable[Event]) -> Iterator[Event]:
    return (Event((*name, block), nbytes) for block, nbytes in events)


def _live(events: Iterable[Event]) -> list[Hashable]:
    """Blocks that are allocated and not freed, in the order in which they were allocated."""
    found: dict[Hashable, None] = {}
    for block, nbytes in events:
        if nbytes:
            found[block] = None
        else:
            found.pop(block, None)
    return list(found)
