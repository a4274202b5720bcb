"""The memory of the machine that a GPU is in.

Enters: bytes, and how fast the way there is, if that is known without a copy. Leaves: a host for
plans of steps on GPUs, those that are not here too. Guarantees: nothing is allocated until a copy
is. Values wait in page-locked memory there, which torch's allocator hands out in powers of two: so
much counts.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import ClassVar

import torch
from autoremat_solver import Link

from autoremat.host import streams
from autoremat.host.disk import Disk
from autoremat.host.pinned import pinned_like
from autoremat.units import format_nbytes, format_us

SAMPLE_NBYTES = 32 << 20  # copied each way to find how fast the way is
SMALL_NBYTES = 512  # of which a copy takes as long as any
_ROUNDS = 7


@dataclass(frozen=True)
class HostMemory:
    """Page-locked memory beside a GPU.

    Attributes:
        asked: as the user wrote it.
        free_nbytes: what values may take there at once.
        speed: of copies there and back, both ways at once; None where they are measured.
        way: what they go over, in words; "" where they are measured.
    """

    asked: str
    free_nbytes: int
    speed: Link | None = None
    way: str = ""
    folder: ClassVar[str] = ""

    def about(self, link: Link) -> str:
        """Where values wait, in words."""
        out, back = (
            format_nbytes(round(1e6 * per_us))
            for per_us in (link.out_nbytes_per_us, link.in_nbytes_per_us)
        )
        if self.speed is not None:
            return f"over {self.way}, {out}/s each way"
        speed = f"{out}/s there and {back}/s back, {format_us(link.latency_us)} a copy, as measured"
        return f"in the memory of the host, {speed}"


Host = Disk | HostMemory
"""Where values wait that leave the device."""


def measured_link(device: torch.device) -> Link:
    """How fast copies from a GPU to its host and back are, both ways at once, measured now."""
    out_us, in_us = _copies_us(SAMPLE_NBYTES, device)
    latency_us = max(_copies_us(SMALL_NBYTES, device))
    return Link(SAMPLE_NBYTES / out_us, SAMPLE_NBYTES / in_us, latency_us, is_pinned=True)


def _copies_us(nbytes: int, device: torch.device) -> tuple[float, float]:
    """What a copy each way takes while the other is under way."""
    here = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    there = [pinned_like(one) for one in here]
    copies = (("out", there[0], here[0]), ("in", here[1], there[1]))
    rounds = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize(device)
        spans = [_timed(*copy, device) for copy in copies]
        torch.cuda.synchronize(device)
        rounds.append([1e3 * begun.elapsed_time(made) for begun, made in spans])
    out_us, in_us = (max(0.1, statistics.median(times)) for times in zip(*rounds, strict=True))
    return out_us, in_us


def _timed(
    way: str, to: torch.Tensor, source: torch.Tensor, device: torch.device
) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Events before and behind a copy."""
    begun, made = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = streams.stream(way, device)
    stream.record_event(begun)
    streams.begin(way, to, source)
    stream.record_event(made)
    return begun, made
