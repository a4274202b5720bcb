"""Inductor's fusion held to the peak of the planned order.

Enters: the kernels of a backward with recomputes, in the plan's order, before Inductor fuses them.
Leaves: the same kernels; a fusion that would raise their peak is refused. Fusing two kernels puts
all that both read and write into memory at once (a recomputed activation beside the gradient that
is computed from the same input), and may draw a kernel far ahead of its place in the plan. Where
memory is at its peak that undoes the recompute; elsewhere fusions are as free as ever.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autoremat import _torch
from autoremat.emit.rewrite import RECOMPUTED


class FusionLimit(_torch.CustomSchedulerPass):
    """What Inductor's scheduler calls before it fuses."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Limit the fusion of these scheduler nodes, if any of them recomputes."""
        if any(RECOMPUTED in name for name in _torch.origin_names(nodes)):
            numbers, kernels = _torch.kernels_before_fusion(nodes)
            buffers = tuple(Buffer(*fields) for fields in kernels.buffers)
            fusions = Fusions(Kernels(kernels.predecessors, buffers))
            _torch.limit_fusion(
                nodes, lambda names: fusions.admit({numbers[name] for name in names})
            )
        return nodes

    def __deepcopy__(self, memo: object) -> FusionLimit:
        """Itself: Inductor copies its configuration."""
        return self

    def uuid(self) -> tuple[str, str]:
        """A key for Inductor's caches; it changes when the rule does."""
        return ("autoremat", "fusion limit 1")


@dataclass(frozen=True)
class Buffer:
    """Memory of one kernel's result, or of an input that may be freed.

    Attributes:
        allocated_nbytes: bytes taken when its maker runs.
        freed_nbytes: bytes returned after its last reader.
        maker: the kernel that makes it; None for an input.
        readers: the kernels that read it.
        is_kept: whether it is live at the end.
    """

    allocated_nbytes: int
    freed_nbytes: int
    maker: int | None
    readers: tuple[int, ...]
    is_kept: bool


@dataclass(frozen=True)
class Kernels:
    """Kernels numbered in the planned order.

    Attributes:
        predecessors: for each kernel those that must run before it.
        buffers: what they make and read.
    """

    predecessors: tuple[tuple[int, ...], ...]
    buffers: tuple[Buffer, ...]


class Fusions:
    """The fusions admitted so far: groups of kernels, and the peak that they may not exceed.

    The limit is the peak without fusion. Nothing is assumed to be reused in place or to stay in
    registers: both happen, but neither can be relied on before code is generated.
    """

    def __init__(self, kernels: Kernels) -> None:
        """Start with each kernel alone."""
        self._kernels = kernels
        self._group = list(range(len(kernels.predecessors)))
        self._members: dict[int, tuple[int, ...]] = {kernel: (kernel,) for kernel in self._group}
        self.limit_nbytes = self.peak_nbytes()

    def admit(self, kernels: Collection[int]) -> bool:
        """Fuse the groups of these kernels, unless that raises the peak above the limit."""
        groups = sorted({self._group[kernel] for kernel in kernels})
        before = {group: self._members[group] for group in groups}
        self._regroup({groups[0]: tuple(sorted(k for group in before.values() for k in group))})
        if self.peak_nbytes() <= self.limit_nbytes:
            return True
        self._regroup(before)
        return False

    def _regroup(self, groups: dict[int, tuple[int, ...]]) -> None:
        self._members.update(groups)
        for group, members in groups.items():
            for kernel in members:
                self._group[kernel] = group

    def peak_nbytes(self) -> int:
        """Highest live bytes when the groups run in the order of their first kernels."""
        step_of = {group: step for step, group in enumerate(self._order())}
        steps = [step_of[group] for group in self._group]
        change = [0] * (len(step_of) + 1)
        live = 0
        for buffer in self._kernels.buffers:
            if buffer.maker is None:
                live += buffer.freed_nbytes
            else:
                change[steps[buffer.maker]] += buffer.allocated_nbytes
            if not buffer.is_kept:
                users = [steps[reader] for reader in buffer.readers]
                born = steps[buffer.maker] if buffer.maker is not None else 0
                change[max(users, default=born) + 1] -= buffer.freed_nbytes
        peak = live
        for nbytes in change:
            live += nbytes
            peak = max(peak, live)
        return peak

    def _order(self) -> list[int]:
        """Groups by their first kernel, each after the groups that it needs."""
        order: list[int] = []
        seen: set[int] = set()
        for kernel, first in enumerate(self._group):
            if kernel != first or first in seen:
                continue
            seen.add(first)
            stack = [(first, self._needs(first))]
            while stack:
                group, needs = stack[-1]
                following = next((need for need in needs if need not in seen), None)
                if following is None:
                    order.append(group)
                    stack.pop()
                else:
                    seen.add(following)
                    stack.append((following, self._needs(following)))
        return order

    def _needs(self, group: int) -> Iterator[int]:
        predecessors: Sequence[tuple[int, ...]] = self._kernels.predecessors
        needed = {self._group[p] for kernel in self._members[group] for p in predecessors[kernel]}
        return iter(sorted(needed - {group}))
