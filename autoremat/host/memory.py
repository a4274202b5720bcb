"""The memory of the machine that a GPU is in, as far as it is known without that machine.

Enters: bytes, and how fast the way there is. Leaves: a host for plans of steps that do not run.
Guarantees: nothing is allocated. Values wait in page-locked memory there, which allocators hand out
in powers of two: so much counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autoremat_solver import Link

from autoremat.host.disk import Disk
from autoremat.units import format_nbytes


@dataclass(frozen=True)
class HostMemory:
    """Page-locked memory beside a GPU.

    Attributes:
        asked: as the user wrote it.
        free_nbytes: what values may take there at once.
        speed: of copies there and back, both ways at once.
        way: what they go over, in words.
    """

    asked: str
    free_nbytes: int
    speed: Link
    way: str
    folder: ClassVar[str] = ""

    def about(self, link: Link) -> str:
        """Where values wait, in words."""
        each_way = format_nbytes(round(1e6 * link.out_nbytes_per_us))
        return f"over {self.way}, {each_way}/s each way"


Host = Disk | HostMemory
"""Where values wait that leave the device."""
