"""What a trial found: a row for each budget.

Enters: figures. Leaves: frozen rows, which say themselves as strict JSON. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

OK, INFEASIBLE = "ok", "infeasible"


@dataclass(frozen=True, slots=True)
class Row:
    """One budget.

    Attributes:
        name: "unlimited", or "75%" of what the step without a plan needs above its resident bytes.
        status: "ok", "infeasible", "out of memory" or "failed"; figures that were not reached are
            None.
        message: why.
        budget_nbytes: of the whole step; None for "unlimited".
        resident_nbytes: parameters and batch.
        predicted_peak_nbytes: highest bytes of a step, resident ones included.
        peak_nbytes: the same as measured, the highest of several steps; on CUDA
            `torch.cuda.max_memory_allocated` over them.
        beside_nbytes: on CUDA, what the allocator had given away beside what is resident as the
            steps began, such as workspaces of libraries.
        predicted_reserved_nbytes: most that the allocator takes from the device.
        reserved_nbytes: the same as measured, `torch.cuda.max_memory_reserved`.
        predicted_us: duration of a step, by operation.
        predicted_code_us: by generated code; None where none was read.
        step_us: as measured, the median.
        first_step_s: of the step that plans and compiles.
    """

    name: str
    status: str = OK
    message: str = ""
    budget_nbytes: int | None = None
    resident_nbytes: int | None = None
    predicted_peak_nbytes: int | None = None
    peak_nbytes: int | None = None
    beside_nbytes: int | None = None
    predicted_reserved_nbytes: int | None = None
    reserved_nbytes: int | None = None
    predicted_us: float | None = None
    predicted_code_us: float | None = None
    step_us: float | None = None
    first_step_s: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether the measured peak is above the budget."""
        peak, budget = self.peak_nbytes, self.budget_nbytes
        return peak is not None and budget is not None and peak > budget


@dataclass(frozen=True, slots=True)
class Trial:
    """All budgets on one device.

    Attributes:
        rows: "unlimited" first, then from the largest budget down.
        layers: of the GPT.
        width: of its residual stream.
        tokens: of a sequence.
        batch: sequences.
        compiler: what ran its planned graphs.
        versions: of Python, torch, CUDA, triton and this package, by name.
        allocator: settings of CUDA's allocator in the environment, or "".
        free_nbytes: of the device's memory as the trial began.
        seconds: of all.
    """

    rows: tuple[Row, ...]
    layers: int
    width: int
    tokens: int
    batch: int
    compiler: str
    versions: dict[str, str]
    allocator: str
    free_nbytes: int
    seconds: float

    @property
    def is_sound(self) -> bool:
        """Whether each budget was kept, or refused since no plan fits it."""
        return all(row.status in (OK, INFEASIBLE) and not row.is_over for row in self.rows)
