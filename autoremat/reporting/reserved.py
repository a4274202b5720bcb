"""What CUDA's caching allocator reserves for a step, for a report.

Enters: bytes from an emulation. Leaves: a frozen `ReservedMemory`; what helps follows from its
cases, and is never stored beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoremat.reporting.fields import ReportError, check_fields

_WORTH = 0.01  # of what is reserved: a setting that lowers it by less is not worth a word


@dataclass(frozen=True, slots=True)
class ReservedCase:
    """Several steps under one setting of the allocator.

    Attributes:
        setting: as `PYTORCH_ALLOC_CONF` takes it; "" for torch's defaults.
        peak_nbytes: most that is taken from the device (`torch.cuda.max_memory_reserved`).
        allocated_nbytes: most that is given away (`torch.cuda.max_memory_allocated`).
        segments: ranges of the device's memory that were taken, at the peak.
        fits: whether the device has so much.
    """

    setting: str
    peak_nbytes: int
    allocated_nbytes: int
    segments: int
    fits: bool

    def __post_init__(self) -> None:
        """Refuses fields of the wrong type."""
        check_fields(self)


@dataclass(frozen=True, slots=True)
class ReservedMemory:
    """What the allocator takes from the device, over several steps.

    Attributes:
        cases: by setting, that of torch's defaults first.
        at_peak_nbytes: allocated as the peak of what is reserved was reached, by default.
        free_nbytes: of the largest blocks that were free then, the largest first.
        steps: how many were emulated.
        device_nbytes: memory of the device.
        budget_nbytes: what was asked for; None where the budget is of what is allocated.
    """

    cases: tuple[ReservedCase, ...]
    at_peak_nbytes: int
    free_nbytes: tuple[int, ...]
    steps: int
    device_nbytes: int
    budget_nbytes: int | None = None

    def __post_init__(self) -> None:
        """Refuses fields of the wrong type, and a first case that is not the default."""
        check_fields(self)
        if not self.cases or self.cases[0].setting:
            raise ReportError("ReservedMemory: its first case is that of torch's defaults.")

    @property
    def default(self) -> ReservedCase:
        """Under torch's defaults."""
        return self.cases[0]

    @property
    def peak_nbytes(self) -> int:
        """Most that is reserved, by default."""
        return self.default.peak_nbytes

    @property
    def idle_nbytes(self) -> int:
        """Reserved and not allocated as that peak was reached: what fragmentation takes."""
        return self.peak_nbytes - self.at_peak_nbytes

    @property
    def helping(self) -> ReservedCase | None:
        """The setting that lowers the peak the most, if any does by a hundredth."""
        best = min((case for case in self.cases if case.fits), key=_peak, default=None)
        if best is None or self.peak_nbytes - best.peak_nbytes < _WORTH * self.peak_nbytes:
            return None
        return best

    @property
    def is_within_budget(self) -> bool:
        """Whether what was asked for holds by default; so it does where nothing was."""
        return self.budget_nbytes is None or self.peak_nbytes <= self.budget_nbytes


def _peak(case: ReservedCase) -> int:
    return case.peak_nbytes
