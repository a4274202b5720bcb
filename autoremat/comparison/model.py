"""What a comparison found: a row for each variant.

Enters: figures from the workers. Leaves: frozen rows, which say themselves as strict JSON, as a
table and as a picture. No torch.
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass

SCHEMA = "autoremat.comparison/1"
OK = "ok"


@dataclass(frozen=True, slots=True)
class Row:
    """One variant's step.

    Attributes:
        name: "eager", "every-layer", "torch:0.5", "autoremat 50%", ...
        kind: "eager", "checkpoint", "compile", "torch" (its own memory budget) or "autoremat".
        compiler: what runs the step, "eager" or "inductor".
        status: "ok", "infeasible", "not applicable", "out of memory", "timeout", "crash" or
            "failed"; figures that were not reached are None.
        message: why, or what to know of a row that is ok.
        peak_nbytes: highest bytes of a step, resident ones included.
        reserved_nbytes: most that CUDA's allocator took from the device; None on a CPU.
        resident_nbytes: parameters, buffers and batch.
        budget_nbytes: what autoremat was asked for, resident bytes included.
        smallest_peak_nbytes: the budget that is accepted, where the one asked for was not.
        predicted_peak_nbytes: what autoremat's plan promised.
        first_step_seconds: of the step that plans and compiles.
        step_seconds: median over the rounds.
        time_ratio: median over the rounds of the step's time over the yardstick's.
        time_ratio_range: smallest and largest of these ratios.
        samples_per_second: batch size over the median step.
        rounds: how many timed steps there were.
    """

    name: str
    kind: str
    compiler: str
    status: str
    message: str = ""
    peak_nbytes: int | None = None
    reserved_nbytes: int | None = None
    resident_nbytes: int | None = None
    budget_nbytes: int | None = None
    smallest_peak_nbytes: int | None = None
    predicted_peak_nbytes: int | None = None
    first_step_seconds: float | None = None
    step_seconds: float | None = None
    time_ratio: float | None = None
    time_ratio_range: tuple[float, float] | None = None
    samples_per_second: float | None = None
    rounds: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows of one run on one machine.

    Attributes:
        target: the function that made model and batch.
        model: class of the model.
        parameters: how many numbers it trains.
        batch: size of the first dimension of the first input.
        device: where the step ran.
        torch_version: what ran it.
        yardstick: name of the row that times are compared with; "" if no step was timed.
        is_complete: False if the run was interrupted: rows or rounds are missing.
        seconds: of the whole run.
        rows: eager first, then in the order asked for.
    """

    target: str
    model: str
    parameters: int
    batch: int
    device: str
    torch_version: str
    yardstick: str
    is_complete: bool
    seconds: float
    rows: tuple[Row, ...]

    def row(self, name: str) -> Row:
        """The row of that name.

        Raises:
            KeyError: if there is none.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def to_json(self) -> str:
        """One object, in strict JSON."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, allow_nan=False)

    def table(self, width: int = 100) -> str:
        """The rows as plain text of at most so many columns."""
        from rich.console import Console

        from autoremat.comparison.table import comparison_table

        text = io.StringIO()
        console = Console(file=text, width=width, color_system=None)
        console.print(comparison_table(self, width))
        return text.getvalue()

    def to_svg(self) -> str:
        """Peak against step time as a picture: the text of one SVG file."""
        from autoremat.comparison.plot import plot

        return plot(self)
