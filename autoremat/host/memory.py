"""The memory of the machine that a GPU is in.

Enters: bytes, and how fast the way there is, if that is known without a copy. Leaves: a host for
plans of steps on GPUs, those that are not here too. Guarantees: nothing is allocated. Values wait
in page-locked memory there, which torch's allocator hands out in powers of two: so much counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from autoremat_solver import Link

from autoremat.host.disk import Disk
from autoremat.units import format_nbytes, format_us


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

    def shared(self, share: float) -> HostMemory:
        """The same for values that may take so much of it."""
        return replace(self, free_nbytes=int(share * self.free_nbytes))

    def less(self, taken_nbytes: int) -> HostMemory:
        """The same beside others of the step, whose values may take so much."""
        return replace(self, free_nbytes=max(0, self.free_nbytes - taken_nbytes))


Host = Disk | HostMemory
"""Where values wait that leave the device."""
