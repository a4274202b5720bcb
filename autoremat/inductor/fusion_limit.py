"""Inductor's fusion, and what it keeps for reuse, held to the peak before anything is fused.

Enters: the kernels of a backward with recomputes, before Inductor fuses them: in the plan's order,
or in Inductor's own where the plan is written out so.
Leaves: the same kernels; a fusion that would raise their peak is refused. Fusing two kernels puts
all that both read and write into memory at once (a recomputed activation beside the gradient that
is computed from the same input), and may draw a kernel far ahead of its place in the plan. Where
memory is at its peak that undoes the recompute; elsewhere fusions are as free as ever.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoremat import _torch
from autoremat._torch import Kernels, Scheduled
from autoremat.emit.rewrite import RECOMPUTED
from autoremat.host.operators import COPIES, OFFLOAD, RELOAD, WAITS

_COPYING = _torch.Copying(frozenset({OFFLOAD}), frozenset({RELOAD}), WAITS)


class FusionLimit(_torch.CustomSchedulerPass):
    """What Inductor's scheduler calls before it fuses."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Limit the fusion of these scheduler nodes, if any of them recomputes or copies."""
        repeats = any(RECOMPUTED in name for name in _torch.origin_names(nodes))
        if repeats or not COPIES.isdisjoint(_torch.called_operators(nodes)):
            _torch.never_reuse(nodes, {OFFLOAD})  # for what else is computed
            kernels = _torch.kernels_before_fusion(nodes, _COPYING)
            limit_nbytes = peak_nbytes(kernels, range(len(kernels.predecessors)))
            _torch.limit_reuse(nodes, limit_nbytes)
            _torch.limit_fusion(
                nodes, kernels.numbers, lambda fused: peak_nbytes(kernels, fused) <= limit_nbytes
            )
            _torch.limit_joining(
                nodes, kernels.numbers, functools.partial(ends_of_functions, kernels, limit_nbytes)
            )
        return nodes

    def __deepcopy__(self, memo: object) -> FusionLimit:
        """Itself: Inductor copies its configuration."""
        return self

    def uuid(self) -> tuple[str, str]:
        """A key for Inductor's caches; it changes when the rule does."""
        return ("autoremat", "fusion limit 7")


def peak_nbytes(kernels: Kernels, fused: Sequence[int]) -> int:
    """Highest live bytes when fused kernels run in the order of their first ones.

    What is written over is counted once. Nothing is assumed to stay in registers, on which one
    cannot rely before code is generated.

    Args:
        kernels: what would run without fusion.
        fused: for each kernel, the first one that it is fused with; itself if it is alone.
    """
    step_of = {first: step for step, first in enumerate(_order(kernels, fused))}
    peak = live = _given_nbytes(kernels)
    for change in _changes(kernels, [step_of[first] for first in fused]):
        peak = max(peak, live + change.taken_nbytes - change.over_nbytes)
        live += change.taken_nbytes - change.freed_nbytes
    return peak


def ends_of_functions(
    kernels: Kernels, limit_nbytes: int, scheduled: Sequence[Scheduled]
) -> set[int]:
    """After which kernels a function ends, so that what they take together is within a limit.

    Args:
        kernels: before fusion.
        limit_nbytes: the peak that is not to be exceeded.
        scheduled: as they are fused, in their order.
    """
    step_of = {part: step for step, kernel in enumerate(scheduled) for part in kernel.parts}
    changes = _changes(kernels, [step_of[part] for part in range(len(kernels.predecessors))])
    ends: set[int] = set()
    live, held = _given_nbytes(kernels), 0  # held: freed when the function ends
    could_share = False
    for step, (kernel, change) in enumerate(zip(scheduled, changes, strict=True)):
        new_nbytes = change.taken_nbytes - change.over_nbytes
        shares = could_share and kernel.may_share and live + new_nbytes <= limit_nbytes
        if step and not shares:
            live, held = live - held, 0
            ends.add(step - 1)
        live += new_nbytes
        held += change.freed_nbytes - change.over_nbytes
        could_share = kernel.may_share
    return ends


@dataclass(frozen=True)
class _Change:
    """What a step takes, of that what it takes over, and what is freed after it; in bytes."""

    taken_nbytes: int
    over_nbytes: int
    freed_nbytes: int


def _given_nbytes(kernels: Kernels) -> int:
    return sum(b.freed_nbytes for b in kernels.buffers if not b.makers)


def _changes(kernels: Kernels, steps: Sequence[int]) -> list[_Change]:
    """By step; the steps are those of the kernels."""
    taken, freed = Counter[int](), Counter[int]()
    for buffer in kernels.buffers:
        born = min((steps[maker] for maker in buffer.makers), default=0)
        if buffer.makers:
            taken[born] += buffer.allocated_nbytes
        if not buffer.is_kept:
            last = max((steps[reader] for reader in buffer.readers), default=born)
            freed[last] += buffer.freed_nbytes
    over = _over_nbytes(kernels, steps)
    return [_Change(taken[n], over[n], freed[n]) for n in range(max(steps, default=-1) + 1)]


def _over_nbytes(kernels: Kernels, steps: Sequence[int]) -> Counter[int]:
    """Bytes of what is written over, by step."""
    over: Counter[int] = Counter()
    for possible in kernels.overwrites:
        step = steps[possible[0].kernel]
        for overwrite in possible:
            if all(steps[kernel] < step for kernel in overwrite.earlier):
                over[step] += overwrite.nbytes
                break
    return over


def _order(kernels: Kernels, fused: Sequence[int]) -> list[int]:
    """The first ones of fused kernels in their order, each after those that it needs."""
    needed: defaultdict[int, set[int]] = defaultdict(set)
    for first, predecessors in zip(fused, kernels.predecessors, strict=True):
        needed[first].update(fused[before] for before in predecessors)
    order: list[int] = []
    seen: set[int] = set()
    for first in sorted(needed):
        if first in seen:
            continue
        seen.add(first)
        stack = [(first, _needs(first, needed))]
        while stack:
            kernel, needs = stack[-1]
            following = next((need for need in needs if need not in seen), None)
            if following is None:
                order.append(kernel)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, _needs(following, needed)))
    return order


def _needs(kernel: int, needed: Mapping[int, set[int]]) -> Iterator[int]:
    return iter(sorted(needed[kernel] - {kernel}))
