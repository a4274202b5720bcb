"""What was measured on this machine before.

Enters: texts that identify a call or a device. Leaves: the figures stored for them. Guarantees:
those of `kept`. Torch is not imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoremat.kept import Kept


@dataclass(frozen=True, slots=True)
class Measured:
    """What running one call showed.

    Attributes:
        time_us: median time of one warm run, in the quietest of a few rounds.
        peak_nbytes: bytes allocated above the inputs at the highest point, outputs included.
        kept_nbytes: bytes that the outputs hold at the end.
    """

    time_us: float
    peak_nbytes: int
    kept_nbytes: int


@dataclass(frozen=True, slots=True)
class DeviceCeilings:
    """The fastest a device was seen to go.

    Attributes:
        copy_gbps: bytes read plus written per second by a large copy, in 10^9.
        matmul_gflops: floating-point operations per second of a large product, in 10^9.
        launch_us: time of the smallest operator.
    """

    copy_gbps: float
    matmul_gflops: float
    launch_us: float


class CostCache(Kept):
    """Figures that were measured."""

    FILE, WHAT = "costs.sqlite3", "operations measured"
    FORMAT = 7  # 4 had a column for each figure, 5 empty groups, 6 times of fewer rounds
