"""Inductor's fusion held to the peak of the planned order.

Enters: the kernels of a backward with recomputes, in the plan's order, before Inductor fuses them.
Leaves: the same kernels; a fusion that would raise their peak is refused. Fusing two kernels puts
all that both read and write into memory at once (a recomputed activation beside the gradient that
is computed from the same input), and may draw a kernel far ahead of its place in the plan. Where
memory is at its peak that undoes the recompute; elsewhere fusions are as free as ever.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoremat import _torch
from autoremat.emit.rewrite import RECOMPUTED


class FusionLimit(_torch.CustomSchedulerPass):
    """What Inductor's scheduler calls before it fuses."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Limit the fusion of these scheduler nodes, if any of them recomputes."""
        if any(RECOMPUTED in name for name in _torch.origin_names(nodes)):
            numbers, predecessors, found, loops = _torch.kernels_before_fusion(nodes)
            kernels = Kernels(predecessors, tuple(Buffer(*fields) for fields in found), loops)
            limit_nbytes = peak_nbytes(kernels, range(len(kernels.predecessors)))
            _torch.limit_fusion(
                nodes, numbers, lambda fused: peak_nbytes(kernels, fused) <= limit_nbytes
            )
        return nodes

    def __deepcopy__(self, memo: object) -> FusionLimit:
        """Itself: Inductor copies its configuration."""
        return self

    def uuid(self) -> tuple[str, str]:
        """A key for Inductor's caches; it changes when the rule does."""
        return ("autoremat", "fusion limit 3")


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
        loops: for each kernel, whether Inductor writes it: it may write over what it reads last.
    """

    predecessors: tuple[tuple[int, ...], ...]
    buffers: tuple[Buffer, ...]
    loops: tuple[bool, ...]


def peak_nbytes(kernels: Kernels, fused: Sequence[int]) -> int:
    """Highest live bytes when fused kernels run in the order of their first ones.

    What ends in a loop that makes another buffer of its size is taken to be written over: else a
    fusion far from there might take as much more as the two of them. Nothing is assumed to stay in
    registers, on which one cannot rely before code is generated.

    Args:
        kernels: what would run without fusion.
        fused: for each kernel, the first one that it is fused with; itself if it is alone.
    """
    step_of = {first: step for step, first in enumerate(_order(kernels, fused))}
    steps = [step_of[first] for first in fused]
    change = [0] * (len(step_of) + 1)
    made, ended = (Counter[tuple[int, int]]() for _ in range(2))  # by step and size
    live = 0
    for buffer in kernels.buffers:
        born = 0 if buffer.maker is None else steps[buffer.maker]
        if buffer.maker is None:
            live += buffer.freed_nbytes
        else:
            change[born] += buffer.allocated_nbytes
            made[born, buffer.allocated_nbytes] += 1
        if not buffer.is_kept:
            last = max((steps[reader] for reader in buffer.readers), default=born)
            change[last + 1] -= buffer.freed_nbytes
            if last > born or buffer.maker is None:
                ended[last, buffer.freed_nbytes] += 1
    peak = live
    over_nbytes = _over_nbytes(kernels, step_of, made & ended)
    for step, nbytes in enumerate(change):
        live += nbytes
        peak = max(peak, live - over_nbytes.get(step, 0))
    return peak


def _over_nbytes(
    kernels: Kernels, step_of: Mapping[int, int], found: Counter[tuple[int, int]]
) -> dict[int, int]:
    """By step, bytes of what is written over: as many buffers of a size are made as end there."""
    loops = {step for first, step in step_of.items() if kernels.loops[first]}
    over: Counter[int] = Counter()
    for (step, nbytes), count in found.items():
        if step in loops:
            over[step] += count * nbytes
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
