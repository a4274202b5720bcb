"""Turns "these values are saved" into a full schedule with just-in-time recompute.

Enters: the values that the backward may read from the forward, and a `Retention`, which says for
how long a recomputed value may be read again before it must be recomputed once more. Leaves: a
schedule of operation numbers that is valid whatever was asked for: values that can only come
from the forward are saved even if the caller forgot them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from autoremat_solver.model.indexed import Indexed
from autoremat_solver.problem import Phase

FOREVER = 1 << 60
Window = tuple[int, int]


@dataclass(frozen=True)
class Retention:
    """Until which backward position a recomputed value may be read (it dies after its last read).

    Attributes:
        segment_end: per backward position, the position up to which values recomputed there may
            be read; None for no limit.
        windows: per value, position ranges; made inside one, it may be read to its end.
        ephemeral: values made anew for every backward operation that reads them.
        release: per saved value, the last position that may read the forward's instance.
    """

    segment_end: list[int] | None = None
    windows: dict[int, list[Window]] = field(default_factory=dict)
    ephemeral: Collection[int] = frozenset()
    release: dict[int, int] = field(default_factory=dict)

    def limit(self, position: int) -> int:
        """The last backward position that may read a value without a range of its own."""
        return FOREVER if self.segment_end is None else self.segment_end[position]

    def expiry(self, value: int, position: int) -> int:
        """The last backward position that may read the value made right before `position`."""
        if value in self.ephemeral:
            return position
        limit = self.limit(position)
        if value in self.windows:
            ends = (last for first, last in self.windows[value] if first <= position <= last)
            limit = max(limit, max(ends, default=limit))
        return limit


KEEP = Retention()


def realise(indexed: Indexed, saved: Collection[int], retention: Retention = KEEP) -> list[int]:
    """The schedule that saves (at most) `saved` and recomputes the rest right before its use.

    Args:
        indexed: the step.
        saved: values of which the backward may read the forward's instance.
        retention: how long recomputed instances may be read.
    """
    state = _Backward(indexed, saved, retention)
    backward, steps, done = indexed.backward_ops, [], 0
    for position in state.positions():
        missing = state.missing(position)
        if missing:
            steps += backward[done:position]
            steps += missing
            done = position
    steps += backward[done:]
    return _forward_steps(indexed, state.read_from_forward) + steps


def _may_save(indexed: Indexed) -> list[bool]:
    """Per value, whether the backward may read an instance that the forward made."""
    backward, barred = indexed.is_backward, indexed.barred
    return [not barred[v] and not backward[op] for v, op in enumerate(indexed.producer)]


class _Backward:
    """Which instance of each value can be read while the backward is laid out."""

    def __init__(self, indexed: Indexed, saved: Collection[int], retention: Retention) -> None:
        self.indexed = indexed
        self.retention = retention
        self.read_from_forward: set[int] = set()
        self._simple = (
            retention.segment_end is None and not retention.windows and not retention.ephemeral
        )
        self._until = [-1] * len(indexed.nbytes)
        self._made_late = [False] * len(indexed.nbytes)
        for v in indexed.from_forward:
            self._until[v] = FOREVER
        may_save, release = indexed.derived(_may_save), retention.release
        for v in self._with_siblings(saved):
            if may_save[v]:
                self._until[v] = max(self._until[v], release.get(v, FOREVER))

    def positions(self) -> list[int]:
        """Backward positions before which something may have to run, ascending, and the first.

        All direct reads of the forward's instances are noted here.
        """
        until = self._until
        found = {0} if self.indexed.backward_ops else set()
        for v in self.indexed.demanded:
            if until[v] == FOREVER:
                self.read_from_forward.add(v)
            else:
                found.update(self.indexed.demanded_at[v])
        return sorted(found)

    def _with_siblings(self, saved: Collection[int]) -> set[int]:
        """The save set and what can then only come from the forward too.

        EITHER operations that run once and that a saved value is made from run in the forward, so
        all that they make is read from there.
        """
        indexed = self.indexed
        result = set(saved)
        stack = [v for v in (*indexed.from_forward, *saved) if indexed.made_either[v]]
        stack += indexed.demands[0] if indexed.demands and indexed.has_either else ()
        seen: set[int] = set()
        while stack:
            op = indexed.producer[stack.pop()]
            if op in seen or indexed.phase[op] is not Phase.EITHER:
                continue
            seen.add(op)
            if not indexed.rerunnable[op]:
                result.update(indexed.outputs[op])
            stack.extend(indexed.inputs[op])
        return result

    def missing(self, position: int) -> list[int]:
        """Operations to run right before the backward operation at `position`."""
        if position == 0:
            self._read_at_once()
            return []
        until, late = self._until, self._made_late
        stack: list[int] = []
        for v in self.indexed.demands[position]:
            if until[v] < position:
                stack.append(v)
            elif not late[v]:
                self.read_from_forward.add(v)
        if not stack:
            return []
        wanted = self._wanted(stack, position)
        self._make(wanted, position)
        if len(wanted) < 2:
            return list(wanted)
        return sorted(wanted, key=self.indexed.rank.__getitem__)

    def _wanted(self, stack: list[int], position: int) -> set[int]:
        """The operations that make the values on the stack from those that can be read."""
        until, late, read = self._until, self._made_late, self.read_from_forward
        producer, inputs = self.indexed.producer, self.indexed.inputs
        wanted: set[int] = set()
        while stack:
            v = stack.pop()
            if until[v] >= position:
                if not late[v]:
                    read.add(v)
                continue
            op = producer[v]
            if op not in wanted:
                wanted.add(op)
                stack.extend(inputs[op])
        return wanted

    def _make(self, ops: Collection[int], position: int) -> None:
        """Note that `ops` run again right before `position`, and until when they may be read."""
        until, late = self._until, self._made_late
        outputs, pinned = self.indexed.outputs, self.indexed.pinned
        rerunnable, retention = self.indexed.rerunnable, self.retention
        limit = retention.limit(position)
        for op in ops:
            for v in outputs[op]:
                if until[v] >= position and not late[v]:
                    continue
                late[v] = True
                if self._simple or pinned[v] or not rerunnable[op]:
                    until[v] = FOREVER
                elif v in retention.windows or v in retention.ephemeral:
                    until[v] = retention.expiry(v, position)
                else:
                    until[v] = limit

    def _read_at_once(self) -> None:
        """What the first backward operation reads comes from the forward, saved or not.

        Nothing runs between the two, so there is no recompute for it; what is not to be saved
        dies right after.
        """
        indexed = self.indexed
        for v in indexed.demands[0]:
            self.read_from_forward.add(v)
            op = indexed.producer[v]
            if not indexed.rerunnable[op]:
                for sibling in indexed.outputs[op]:
                    self._until[sibling] = FOREVER
            self._until[v] = max(self._until[v], 0)


def _forward_steps(indexed: Indexed, read_from_forward: Collection[int]) -> list[int]:
    """The forward: its own operations and the EITHER ones whose result the backward reads."""
    if not indexed.has_either:
        return list(indexed.forward_order)
    producer, made_either = indexed.producer, indexed.made_either
    wanted = set(indexed.always_forward)
    stack = [producer[v] for v in read_from_forward if made_either[v]]
    stack += indexed.early_either
    while stack:
        op = stack.pop()
        wanted.add(op)
        stack.extend(
            producer[v] for v in indexed.inputs[op] if made_either[v] and producer[v] not in wanted
        )
    return [op for op in indexed.forward_order if op in wanted]
