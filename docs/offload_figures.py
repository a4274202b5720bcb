"""Regenerate `offload_figures.md` and the rows beside it, `offload_figures.json`.

    python docs/offload_figures.py [--only CASE;...] [--resume] [--page]

Steps whose values wait in files, run: each model under a budget with `offload=`, under the same
budget without, and without a plan. One thread computes, float32, random weights; each case in a
process of its own, its steps interleaved.
"""

from __future__ import annotations

import copy
import gc
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from autoremat_solver import Link
from measured_models import run
from own_process import forget_plans
from page_tables import Columns, Promise, how_made, is_done, mib, table, verdicts
from row_store import Row
from torch import Tensor, nn

import autoremat
from autoremat.cost import host_link
from autoremat.host import operators
from tests import models
from tests.models import Case

PAGE = Path(__file__).parent / "offload_figures.md"
# Percent of what the step without a plan takes above what is resident.
BUDGETS = {
    "gpt2": (50, 30, 20, 10),
    "llama": (50, 30, 20, 18, 13, 10),
    "unet": (50, 45, 40, 30),
    "mlp": (50, 30),
}
COMPILERS = ("inductor", "eager")
CASES = (
    *(f"{m}, {c}, {s}%" for m, shares in BUDGETS.items() for c in COMPILERS for s in shares),
    *(f"{m}, {c}, 50%, as if free" for m in ("gpt2", "llama", "unet") for c in COMPILERS),
)
FREE = Link(out_nbytes_per_us=1e5, in_nbytes_per_us=1e5)
ROUNDS = 15
SETTLED_AFTER = 4  # steps
UNBOUNDED = 10**15  # bytes
LOOSEST = 1e-4  # of the largest gradient of a parameter: what compiled steps may differ by

ABOUT = f"""# Values that wait elsewhere: figures

What [`offload="disk:PATH"`](offload.md) does to steps that run, on a CPU: a budget is a share of
what the step without a plan takes above what is resident, under the same compiler
(`torch.compile`, or eager mode). Peaks are measured, above what is resident. Times are medians of
{ROUNDS} steps, interleaved, as a share of the step without a plan; computing has one thread, and
copies the other core. Gradients are compared with those of `torch.compile`, or of a plan that makes
nothing again in eager mode: under Inductor the order of sums may differ, so the largest difference
is given as a share of the largest gradient of its parameter. The folder is on the disk of a shared
machine with memory to spare, so files are mostly written to and read from the system's cache: where
memory is short the disk decides. Plans go by what copies were measured to cost in the row's own
process, so that one may let values leave where another does not; **as if free** they go by copies
that cost next to nothing, so that more leave than is worth it here. Where recompute alone has the
same plan, its two times show by how much times of one plan differ.
"""


def row_of(key: str) -> Row:
    """One model, compiler and budget."""
    forget_plans()
    name, compiler, share, *as_if = key.split(", ")
    if as_if:
        host_link._measured = lambda disk: FREE
    case = models.CASES[name]()
    plain = Ran(case, copy.deepcopy(case.model))
    if compiler == "inductor":
        plain.model.compile()
    plain_nbytes = plain.peak_nbytes()
    resident = autoremat.resident_nbytes(plain.model, case.inputs)
    budget = resident + int(float(share.rstrip("%")) / 100 * plain_nbytes)
    row = {
        "model": f"{name}, {compiler}",
        "plain_nbytes": plain_nbytes,
        "budget_nbytes": budget - resident,
    }
    expected = plain.gradients()
    if compiler == "eager":  # of which eager mode itself differs by what is decomposed
        expected = Ran.planned(case, UNBOUNDED, compiler).gradients()
        gc.collect()
    # One after the other: a planned model counts what another holds that lives beside it.
    with tempfile.TemporaryDirectory() as folder:
        try:
            ours = Ran.planned(case, budget, compiler, offload=f"disk:{folder}")
        except autoremat.InfeasibleBudget as refusal:
            needed = refusal.smallest_peak_nbytes - resident
            return row | {"status": "refused", "message": f"refused: needs {mib(needed)} MiB"}
        row |= _of_ours(ours, expected, resident) | {"ours_share": _share_of_time(ours, plain)}
        plan = _plan_of(ours)
        del ours
    if as_if:
        return row
    gc.collect()
    try:
        alone = Ran.planned(case, budget, compiler)
        is_same = _plan_of(alone) == plan
        return row | {"alone_share": _share_of_time(alone, plain), "is_same_plan": is_same}
    except autoremat.InfeasibleBudget as refusal:
        return row | {"alone_needs_nbytes": refusal.smallest_peak_nbytes - resident}


class Ran:
    """A model whose steps are run."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        self._case, self.model = case, model

    @classmethod
    def planned(cls, case: Case, budget: int, compiler: str, **options: Any) -> Ran:
        """Under a budget, after the steps that may show that another plan does better."""
        model = copy.deepcopy(case.model)
        autoremat.optimize(model, budget, compiler=compiler, verbose=False, **options)
        found = cls(case, model)
        for _ in range(SETTLED_AFTER):
            found.step()
        return found

    def step(self) -> None:
        """Forward and backward from no gradients, and none are left."""
        self._case.loss_of(self._case.forward(self.model, self._case.inputs)).backward()
        self.model.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor | None]:
        """Those of a step."""
        self._case.loss_of(self._case.forward(self.model, self._case.inputs)).backward()
        copies = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        self.model.zero_grad(set_to_none=True)
        return copies

    def peak_nbytes(self) -> int:
        """Measured, above what is resident."""
        self.step()
        return int(autoremat.measure_peak(self.step, device="cpu"))


def _of_ours(ours: Ran, expected: list[Tensor | None], resident: int) -> Row:
    moved = Counter[str]()
    begin = operators._begin

    def counted(way: str, to: Tensor, source: Tensor) -> Tensor:
        moved[way] += source.nbytes
        return begin(way, to, source)

    operators._begin = counted
    gradients = ours.gradients()
    operators._begin = begin
    both = zip(gradients, expected, strict=True)
    pairs = [(mine, its) for mine, its in both if mine is not None and its is not None]
    report = autoremat.report(ours.model)
    waiting = report.graphs[0].waiting
    return {
        "measured_nbytes": ours.peak_nbytes(),
        "predicted_nbytes": report.predicted_peak_nbytes - resident,
        "planned_to_move_nbytes": 0 if waiting is None else waiting.nbytes,
        "moved_out_nbytes": moved["out"],
        "moved_in_nbytes": moved["in"],
        "values": 0 if waiting is None else len(waiting.trips),
        "is_bitwise": all(torch.equal(a, b) for a, b in pairs),
        "difference": max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs),
    }


def _plan_of(ran: Ran) -> list[tuple[str, str]]:
    """What becomes of each value, in the order in which they are made."""
    return [(v.name, v.action) for v in autoremat.report(ran.model).graphs[0].values]


def _share_of_time(one: Ran, plain: Ran) -> float:
    """The median time of its steps, of that of the plain ones between them."""
    times: dict[Ran, list[float]] = {plain: [], one: []}
    for _ in range(ROUNDS):
        for which, found in times.items():
            began = time.perf_counter()
            which.step()
            found.append(time.perf_counter() - began)
    return statistics.median(times[one]) / statistics.median(times[plain])


COLUMNS: Columns = {
    "model": lambda r: r["model"],
    "budget": lambda r: r["key"].removeprefix(f"{r['model']}, "),
    "without a plan MiB": lambda r: mib(r.get("plain_nbytes")),
    "budget MiB": lambda r: mib(r.get("budget_nbytes")),
    "measured MiB": lambda r: mib(r.get("measured_nbytes")),
    "predicted MiB": lambda r: mib(r.get("predicted_nbytes")),
    "values that leave": lambda r: str(r.get("values", "")),
    "each way MiB": lambda r: mib(r.get("moved_out_nbytes")),
    "time": lambda r: _share(r, "ours"),
    "recompute alone: time": lambda r: (
        _share(r, "alone") + (" (the same plan)" if r.get("is_same_plan") else "")
    ),
    "recompute alone: needs MiB": lambda r: mib(r.get("alone_needs_nbytes")),
    "gradients": lambda r: _difference(r) if is_done(r) else "",
    "": lambda r: "" if is_done(r) else r.get("message", r["status"]),
}


def _share(row: Row, which: str) -> str:
    found = row.get(f"{which}_share")
    return "" if found is None else f"{found:.2f}"


def _difference(row: Row) -> str:
    return "bitwise the same" if row["is_bitwise"] else f"{row['difference']:.0e}"


def _promises(done: list[Row]) -> Iterator[Promise]:
    yield (
        "the measured peak is within the budget",
        [(r["key"], r["measured_nbytes"] <= r["budget_nbytes"]) for r in done],
    )
    yield (
        "and within 0.5 % of what was predicted",
        [(r["key"], abs(r["measured_nbytes"] / r["predicted_nbytes"] - 1) <= 0.005) for r in done],
    )
    yield (
        "as many bytes leave and come back as planned",
        [
            (r["key"], r["moved_out_nbytes"] == r["moved_in_nbytes"] == r["planned_to_move_nbytes"])
            for r in done
        ],
    )
    yield (
        "gradients are bitwise those of a plan that makes nothing again (eager)",
        [(r["key"], r["is_bitwise"]) for r in done if "eager" in r["key"]],
    )
    yield (
        f"gradients are within {LOOSEST:.0e} of them (Inductor)",
        [(r["key"], r["difference"] <= LOOSEST) for r in done if "inductor" in r["key"]],
    )
    yield (
        "no slower than recompute alone, where that fits with another plan, by more than 2 %",
        [
            (r["key"], r["ours_share"] <= 1.02 * r["alone_share"])
            for r in done
            if "alone_share" in r and not r.get("is_same_plan")
        ],
    )


def page(runs: list[Row], rows: list[Row]) -> str:
    """The page."""
    done = [row for row in rows if is_done(row)]
    missing = "; ".join(key for key in CASES if key not in {row["key"] for row in rows})
    return "\n".join(
        [
            ABOUT,
            table(COLUMNS, rows),
            verdicts(_promises(done)),
            "## How this was made\n",
            how_made(runs),
            "",
            f"Not run: GPUs{'; ' if missing else ''}{missing}.",
            "",
        ]
    )


if __name__ == "__main__":
    run(PAGE, page, CASES, row_of, ("measured_nbytes", "budget_nbytes", "ours_share"))
