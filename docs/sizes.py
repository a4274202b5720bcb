"""Regenerate `sizes.md` and the rows beside it, `sizes.json`.

    python docs/sizes.py [--only MODEL;...] [--resume] [--page]

The batch that `autoremat.fit` names without running anything, held against an exhaustive search by
running: every batch from one to one beyond it is optimised under the budget, trained for a step and
measured. Small models on one thread, op by op (`compiler="eager"`), from configurations with random
weights; each model in a process of its own.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from benchmark_models import loss_alone, models, solver_graphs
from measured_models import run
from own_process import forget_plans
from page_tables import Columns, Promise, how_made, is_done, mib, percent, table, verdicts
from row_store import Row
from torch import Tensor

import autoremat
from tests.models import Case

PAGE = Path(__file__).parent / "sizes.md"
FREE_BATCH = 2  # whose step without a plan the budget just holds
BEYOND = 1  # batches above the largest that are run all the same
TIME_LIMIT_S = 1.0
POINTS = 0  # sizes that are planned to find the fastest

CASES: dict[str, Callable[[], Case]] = {
    "gpt2": partial(loss_alone, models.gpt2, "gpt2", layers=1, batch=1, tokens=32),
    "llama": partial(loss_alone, models.llama, "llama", layers=1, batch=1, tokens=32),
    "bert": partial(loss_alone, models.bert, "bert", layers=1, batch=1, tokens=32),
    "t5": partial(loss_alone, solver_graphs.t5, "t5", layers=1, batch=1, tokens=32),
    "vit": partial(loss_alone, solver_graphs.vit, "vit", layers=1, batch=1, size=64),
    "unet": partial(loss_alone, models.unet, "unet", batch=1, size=32),
}

INTRODUCTION = """# The batch that fits

<!-- not run: the model is yours -->
```python
found = autoremat.fit(model, make_batch, "40GiB", device="H100", optimizer=optimizer)
found.largest.size, found.fastest.size
print(found.text())
```

`make_batch(n)` returns a batch of `n`: a tensor, a tuple, or a dict. Nothing runs, so nothing runs
out of memory: few sizes are planned, as `autoremat.plan` plans them, on fake tensors. On the
command line it is `autoremat fit TARGET --budget 40GiB`; `--svg` draws throughput over batch, with
the plain step and per-layer checkpointing beside it where they fit.

- **The largest** fits, and the next one was refused. What the budget leaves is said (the margin);
  `reserve=0.05` keeps a share of it free.
- **The fastest** has the most samples per second of the sizes that were planned. It is often
  smaller: near the largest, most of a step is recompute.
- **A global batch** (`global_batch=256`): how many forwards and backwards of which size, planned
  beside the gradients of those before, which a first part does not have.
- `over="sequence"`, `multiple_of=64`: any size that your function takes. What the model does not
  accept ends the search, with its own words. On fake tensors an index beyond a table does not fail:
  tables that are shorter than the size are named.

Peaks grow with the size nearly along a line, so sizes are searched by lines; those that do not fit
are the most expensive ones to plan. Times of operations are those of a data sheet, or measured on
the device that is here, then at each size that is planned.

## The peak as a formula

The peak of a plan for sizes that vary (`torch._dynamo.mark_dynamic`, `dynamic=True`) is written
down:

<!-- not run: the model is yours -->
```python
torch._dynamo.mark_dynamic(batch, 0)
report = autoremat.plan(model, batch, budget="12GiB", device="H100", compiler="eager")
report.peak_formula.text()  # max(393.4 kB * batch + 745.4 kB, 325.0 kB * batch + 1.1 MB)
report.peak_formula.at(batch=24)  # bytes
```

It is the simulator's peak, exact to the byte at every size of its range, rounding of the allocator
included; of workspaces, which are taken to grow as all storages do, a fraction of a byte counts as
none. Each piece is a step of the plan. Steps that are left out are proven to be nowhere the
highest: by factors, in the corners of the range, or size by size. Before it is shown, it is held
against the simulator at the corners of its range; where one value is written over another depending
on their sizes they may differ, and then there is none. Under Inductor the peak of the generated
code is another one: there the formula is the model's.

## `fit` against running every batch
"""

ABOUT = (
    "Small models of one layer (T5 has one in encoder and decoder each; the UNet is whole). "
    f"Budgets are what the step without a plan takes of {FREE_BATCH} samples. CPU, float32, op "
    f'by op (`compiler="eager"`), `time_limit={TIME_LIMIT_S:.0f}`, `points={POINTS}`. What is '
    "measured is a whole step, resident bytes included. Other work was running beside this: "
    "seconds, and the times that the fastest batch rests on, are coarse.\n"
)


def key_of(model: str, batch: int) -> str:
    """Of a row."""
    return f"{model}, batch {batch}"


def batch_of(case: Case, size: int) -> tuple[Tensor, ...]:
    """A batch of a size: the case's first sample, so many times."""
    return tuple(t[:1].repeat(size, *[1] * (t.dim() - 1)) for t in case.inputs)


def row_of(name: str) -> Row:
    """What `fit` says of a model, and what every batch takes."""
    forget_plans()
    case = CASES[name]()
    budget = _budget(case)
    began = time.monotonic()
    found = autoremat.fit(
        case.model,
        partial(batch_of, case),
        budget,
        compiler="eager",
        points=POINTS,
        time_limit=TIME_LIMIT_S,
        verbose=False,
    )
    fit_seconds = time.monotonic() - began
    began = time.monotonic()
    predicted = {point.size: point.plan.peak_nbytes for point in found.points}
    tried = []
    for size in range(1, found.largest.size + BEYOND + 1):
        tried.append(
            {"batch": size, "predicted_nbytes": predicted.get(size)} | _run(case, size, budget)
        )
    return {
        "key": name,
        "model": name,
        "budget_nbytes": budget,
        "fit_largest": found.largest.size,
        "fit_fastest": found.fastest.size,
        "fastest_gain": found.fastest.per_second / found.largest.per_second - 1,
        "planned": len(found.points) + len(found.refused),
        "formula": "" if found.formula is None else found.formula.text(),
        "fit_seconds": fit_seconds,
        "run_seconds": time.monotonic() - began,
        "run_largest": max((t["batch"] for t in tried if t["fits"]), default=0),
        "tried": tried,
    }


def _budget(case: Case) -> int:
    """What the step without a plan takes of a few samples."""
    report = autoremat.plan(
        case.model,
        *batch_of(case, FREE_BATCH),
        budget=1 << 50,
        compiler="eager",
        verbose=False,
        time_limit=TIME_LIMIT_S,
    )
    return report.baseline_peak_nbytes


def _run(case: Case, size: int, budget: int) -> Row:
    """A step of a batch, under a plan: whether it is refused, and what it takes."""
    torch.compiler.reset()
    model, batch = copy.deepcopy(case.model), batch_of(case, size)
    autoremat.optimize(model, budget, compiler="eager", verbose=False, time_limit=TIME_LIMIT_S)
    try:
        model(*batch).backward()
    except autoremat.InfeasibleBudget as refusal:
        return {"fits": False, "smallest_nbytes": refusal.smallest_peak_nbytes}
    model.zero_grad(set_to_none=True)
    resident = autoremat.resident_nbytes(model, batch)
    measured = resident + autoremat.measure_peak(lambda: model(*batch).backward(), device="cpu")
    planned = autoremat.report(model).predicted_peak_nbytes
    fits = measured <= budget
    return {"fits": fits, "measured_nbytes": measured, "planned_nbytes": planned}


def _error(tried: Row) -> float | None:
    """Of the prediction: `fit`'s where it planned this batch, else that of the plan that ran."""
    if not tried.get("measured_nbytes"):
        return None
    predicted = tried.get("predicted_nbytes") or tried["planned_nbytes"]
    return float(predicted / tried["measured_nbytes"] - 1)


def _worst(row: Row) -> float | None:
    errors = [error for tried in row.get("tried", ()) if (error := _error(tried)) is not None]
    return max(errors, key=abs, default=None)


COLUMNS: Columns = {
    "model": lambda r: r["model"],
    "budget MiB": lambda r: mib(r.get("budget_nbytes")),
    "`fit`: largest": lambda r: str(r.get("fit_largest", "")),
    "by running: largest": lambda r: str(r.get("run_largest", "")),
    "`fit`: fastest": lambda r: str(r.get("fit_fastest", "")),
    "which is faster by": lambda r: percent(100 * r["fastest_gain"], 1) if is_done(r) else "",
    "worst prediction": lambda r: "" if (e := _worst(r)) is None else percent(100 * e),
    "sizes planned": lambda r: str(r.get("planned", "")),
    "`fit` s": lambda r: f"{r['fit_seconds']:.0f}" if is_done(r) else "",
    "running s": lambda r: f"{r['run_seconds']:.0f}" if is_done(r) else "",
    "": lambda r: "" if is_done(r) else r.get("message", r["status"]),
}
COLUMNS_OF_BATCHES: Columns = {
    "model": lambda r: r["model"],
    "batch": lambda r: str(r["batch"]),
    "predicted MiB": lambda r: mib(r.get("predicted_nbytes") or r.get("planned_nbytes")),
    "measured MiB": lambda r: mib(r.get("measured_nbytes")),
    "error": lambda r: "" if (e := _error(r)) is None else percent(100 * e),
    "refused: needs MiB": lambda r: mib(r.get("smallest_nbytes")),
}


def _promises(done: list[Row], tried: list[Row]) -> Iterator[Promise]:
    """What is promised, and which rows keep it."""
    yield (
        "the largest batch is the one that an exhaustive search by running finds",
        [(r["key"], r["fit_largest"] == r["run_largest"]) for r in done],
    )
    yield (
        "no batch that `fit` names is above the budget when it runs",
        [
            (key_of(r["model"], t["batch"]), t["fits"])
            for r in done
            for t in r["tried"]
            if t["batch"] in (r["fit_largest"], r["fit_fastest"])
        ],
    )
    yield (
        "predicted within 2 % of what is measured",
        [
            (key_of(r["model"], r["batch"]), abs(error) <= 0.02)
            for r in tried
            if (error := _error(r)) is not None
        ],
    )


def page(runs: list[Row], rows: list[Row]) -> str:
    """The page."""
    done = [row for row in rows if is_done(row)]
    tried = [{"model": row["model"], **one} for row in done for one in row["tried"]]
    formulas = [f"- {row['model']}: `{row['formula']}`" for row in done if row.get("formula")]
    return "\n".join(
        [
            INTRODUCTION,
            ABOUT,
            table(COLUMNS, rows),
            verdicts(_promises(done, tried)),
            "## Each batch\n",
            table(COLUMNS_OF_BATCHES, tried),
            "## Formulas of the largest batches' plans\n",
            "\n".join(formulas) or "None was found.",
            "",
            "## How this was made\n",
            how_made(runs),
            "",
            "Not run: GPUs, Inductor, and the batch finders of accelerate and Lightning.",
            "",
        ]
    )


if __name__ == "__main__":
    run(PAGE, page, list(CASES), row_of, ("fit_largest", "run_largest"))
