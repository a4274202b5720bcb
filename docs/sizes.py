"""Regenerate `sizes.md` and the rows beside it, `sizes.json`.

    python docs/sizes.py [--only CASE;...] [--resume] [--page]

The size that `autoremat.fit` names without running anything, held against an exhaustive search by
running: every size from the first to one beyond it is optimised under the budget, trained for some
steps and measured. Small models on one thread, op by op (`compiler="eager"`), from configurations
with random weights; each case in a process of its own. The batch finders of accelerate and
Lightning are asked as well, of the step without a plan.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from batch_finders import FINDERS, STEPS, found_by
from measured_models import run
from own_process import forget_plans
from page_tables import Columns, Promise, how_made, is_done, mib, percent, table, verdicts
from row_store import Row
from sized_cases import CASES, STEPS_BEFORE, Sized

import autoremat

PAGE = Path(__file__).parent / "sizes.md"
ROOM = 0.02  # of a budget, above the step without a plan that it is to hold
BEYOND = 1  # sizes above the largest that are run all the same
TIME_LIMIT_S = 1.0
READABLE = 200  # characters of a formula
POINTS = 0  # sizes that are planned to find the fastest

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
the plain step, per-layer checkpointing and torch's own budget beside it where they fit.

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

## Confirmed by one step

Where the device is at hand, one step at the size that was found confirms it:

<!-- not run: the model is yours -->
```python
model = autoremat.optimize(model, "40GiB")
batch = make_batch(found.largest.size)


def step():
    model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


for _ in range(3):  # planned, compiled, and the optimizer has its state
    step()
peak = autoremat.resident_nbytes(model, batch, optimizer) + autoremat.measure_peak(step)
peak / found.largest.plan.peak_nbytes  # measured over predicted
```

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

## `fit` against running every size
"""

ABOUT = (
    "Small models of one layer or as many as it says (T5 has so many in encoder and decoder each; "
    "the UNet is whole). A budget is what the step without a plan takes at a size, and "
    f"{100 * ROOM:.0f} % more; with AdamW its state and what its step allocates count. CPU, "
    f'float32, op by op (`compiler="eager"`), `time_limit={TIME_LIMIT_S:.0f}`, `points={POINTS}`. '
    "By running: every multiple from the first to one beyond the largest that `fit` names is "
    "optimised under the budget and trained; a plan that `fit` has made of a size is found again. "
    f"What is measured is a whole step after {STEPS_BEFORE} others, resident bytes included. Other "
    "work was running beside this: seconds, and the times that the fastest size rests on, are "
    "coarse.\n"
)
ABOUT_FINDERS = (
    "The same models and budgets, for the step *without* a plan: these finders do not recompute, "
    "so their batch is to be held against the largest without a plan. They find it by running. A "
    "CPU runs out of no memory here: which batches are within the budget was measured beforehand, "
    'and a step of a larger one raises "CUDA out of memory." once it is over. accelerate\'s '
    "`find_executable_batch_size` is as it is (from 128 down, each 0.9 of the one before), with "
    f"{STEPS} steps for each batch; Lightning's `Tuner.scale_batch_size` also has {STEPS}, in mode "
    '"power" (as it is) and "binsearch" with `margin=0` (by default it takes off 5 %, which is at '
    'least one sample of two). "power" returns powers of two, so where the largest is another one '
    "it does not find it.\n\n"
    "Their seconds are those of steps of a tiny model on a CPU, and say nothing of a GPU's: there "
    "each trial is a step of the real model on the device that is asked about. `fit` runs no step "
    "and needs no device: its seconds are those of planning, which depend on the graph and on "
    "`time_limit`, not on how long a step takes.\n"
)


def key_of(case: str, size: int) -> str:
    """Of a row."""
    return f"{case}, {size}"


def row_of(name: str) -> Row:
    """What `fit` says of a case, what every size takes, and what the batch finders say."""
    forget_plans()
    sized = CASES[name]
    budget = int(sized.plain_nbytes(sized.free * sized.step) * (1 + ROOM))
    began = time.monotonic()
    training = sized.training()
    found = autoremat.fit(
        training.model,
        sized.batch,
        budget,
        over=sized.over,
        multiple_of=sized.step,
        optimizer=training.optimizer,
        compiler="eager",
        points=POINTS,
        time_limit=TIME_LIMIT_S,
        verbose=False,
    )
    fit_seconds = time.monotonic() - began
    began = time.monotonic()
    predicted = {point.size: point.plan.peak_nbytes for point in found.points}
    tried = []
    for size in range(sized.step, found.largest.size + BEYOND * sized.step + 1, sized.step):
        tried.append(
            {"size": size, "predicted_nbytes": predicted.get(size)} | _run(sized, size, budget)
        )
    run_seconds = time.monotonic() - began
    plain = _largest_plain(sized, budget)
    return {
        "key": name,
        "model": sized.model,
        "over": sized.over,
        "multiple_of": sized.step,
        "layers": sized.layers if sized.has_layers else None,
        "optimizer": "AdamW" if sized.adam else "",
        "budget_nbytes": budget,
        "plain_largest": plain,
        "fit_largest": found.largest.size,
        "fit_fastest": found.fastest.size,
        "fastest_gain": found.fastest.per_second / found.largest.per_second - 1,
        "planned": len(found.points) + len(found.refused),
        "formula": "" if found.formula is None else found.formula.text(),
        "fit_seconds": fit_seconds,
        "run_seconds": run_seconds,
        "run_largest": max((t["size"] for t in tried if t["fits"]), default=0),
        "tried": tried,
        "finders": [found_by(one, sized, plain) for one in FINDERS if sized == Sized(sized.model)],
    }


def _largest_plain(sized: Sized, budget: int) -> int:
    """The largest size whose step fits without a plan, by running."""
    size = 0
    while sized.plain_nbytes(size + sized.step) <= budget:
        size += sized.step
    return size


def _run(sized: Sized, size: int, budget: int) -> Row:
    """Steps of a size, under a plan: whether it is refused, and what it takes."""
    torch.compiler.reset()
    training, batch = sized.training(), sized.batch(size)
    autoremat.optimize(
        training.model,
        budget,
        optimizer=training.optimizer,
        compiler="eager",
        verbose=False,
        time_limit=TIME_LIMIT_S,
    )
    try:
        for _ in range(STEPS_BEFORE):
            training.step(batch)
        measured = training.measured_nbytes(batch)
    except autoremat.InfeasibleBudget as refusal:
        return {"fits": False, "smallest_nbytes": refusal.smallest_peak_nbytes}
    planned = autoremat.report(training.model).predicted_peak_nbytes
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
    "sizes": lambda r: _of_sizes(r) if is_done(r) else "",
    "layers": lambda r: str(r.get("layers") or ""),
    "optimizer": lambda r: r.get("optimizer", ""),
    "budget MiB": lambda r: mib(r.get("budget_nbytes")),
    "without a plan: largest": lambda r: str(r.get("plain_largest", "")),
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
COLUMNS_OF_SIZES: Columns = {
    "case": lambda r: r["key"],
    "size": lambda r: str(r["size"]),
    "predicted MiB": lambda r: mib(r.get("predicted_nbytes") or r.get("planned_nbytes")),
    "measured MiB": lambda r: mib(r.get("measured_nbytes")),
    "error": lambda r: "" if (e := _error(r)) is None else percent(100 * e),
    "refused: needs MiB": lambda r: mib(r.get("smallest_nbytes")),
}
COLUMNS_OF_FINDERS: Columns = {
    "model": lambda r: r["model"],
    "without a plan: largest": lambda r: str(r["plain_largest"]),
    "finder": lambda r: r["finder"],
    "finds": lambda r: "none" if r["batch"] is None else str(r["batch"]),
    "steps": lambda r: str(r["steps"]),
    "of these out of memory": lambda r: str(r["failed"]),
    "s": lambda r: f"{r['seconds']:.1f}",
    "`fit`: largest": lambda r: str(r["fit_largest"]),
    "`fit` s": lambda r: f"{r['fit_seconds']:.1f}",
}


def _of_sizes(row: Row) -> str:
    """What the size is of."""
    step = row["multiple_of"]
    return row["over"] if step == 1 else f"{row['over']}, multiples of {step}"


def _promises(done: list[Row], tried: list[Row]) -> Iterator[Promise]:
    """What is promised, and which rows keep it."""
    yield (
        "the largest size is the one that an exhaustive search by running finds",
        [(r["key"], r["fit_largest"] == r["run_largest"]) for r in done],
    )
    yield (
        "no size that `fit` names is above the budget when it runs",
        [
            (key_of(r["key"], t["size"]), t["fits"])
            for r in done
            for t in r["tried"]
            if t["size"] in (r["fit_largest"], r["fit_fastest"])
        ],
    )
    yield (
        "predicted within 2 % of what is measured",
        [
            (key_of(r["key"], r["size"]), abs(error) <= 0.02)
            for r in tried
            if (error := _error(r)) is not None
        ],
    )


def _in_all(finders: list[Row]) -> str:
    """Seconds and steps of each finder, and the seconds of `fit`, of the cases of all."""
    said = []
    for name in FINDERS:
        own = [row for row in finders if row["finder"] == name]
        best = sum(row["batch"] == row["plain_largest"] for row in own)
        steps, seconds = (sum(row[of] for row in own) for of in ("steps", "seconds"))
        said.append(
            f"{name}: {seconds:.0f} s, {steps} steps, and the largest batch without a plan in "
            f"{best} of {len(own)}"
        )
    ours = sum(row["fit_seconds"] for row in finders if row["finder"] == next(iter(FINDERS)))
    return f"In all, of these cases: {'; '.join(said)}. `fit`: {ours:.0f} s, no step.\n"


def _formulas(done: list[Row]) -> str:
    """Those that can be read, a line each, and of which cases there are others."""
    found = {row["key"]: row["formula"] for row in done if row["formula"]}
    lines = [f"- {key}: `{text}`" for key, text in found.items() if len(text) <= READABLE]
    longer = [key for key, text in found.items() if len(text) > READABLE]
    lines += [f"- Of many terms, not shown: {'; '.join(longer)}."] if longer else []
    none = [row["key"] for row in done if not row["formula"]]
    lines += [f"- Without one: {'; '.join(none)}."] if none else []
    return "\n".join(lines)


def _not_run(rows: list[Row]) -> str:
    """What there are no figures of."""
    keys = {row["key"] for row in rows}
    missing = "; ".join(key for key in CASES if key not in keys)
    beside = f" Nor these cases: {missing}." if missing else ""
    return f"Not run: GPUs and Inductor; finders on any but the first case of each model.{beside}"


def page(runs: list[Row], rows: list[Row]) -> str:
    """The page."""
    done = [row for row in rows if is_done(row)]
    tried = [{"key": row["key"], **one} for row in done for one in row["tried"]]
    finders = [{**row, **one} for row in done for one in row["finders"]]
    return "\n".join(
        [
            INTRODUCTION,
            ABOUT,
            table(COLUMNS, rows),
            verdicts(_promises(done, tried)),
            "## Batch finders\n",
            ABOUT_FINDERS,
            table(COLUMNS_OF_FINDERS, finders),
            _in_all(finders),
            "## Each size\n",
            table(COLUMNS_OF_SIZES, tried),
            "## Formulas of the largest sizes' plans\n",
            _formulas(done),
            "",
            "## How this was made\n",
            how_made(runs),
            "",
            _not_run(rows),
            "",
        ]
    )


if __name__ == "__main__":
    run(PAGE, page, list(CASES), row_of, ("fit_largest", "run_largest", "fit_seconds"))
