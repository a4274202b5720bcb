"""Regenerate `varying_sizes.md` and the rows beside it, `varying_sizes.json`.

    python docs/varying_sizes.py [--only MODEL;...] [--resume] [--page]

One plan for a range of sizes, held against what is measured: each model is optimised with `sizes=`,
its batches are drawn from all sizes of the range, and every step is measured. Small models on one
thread, op by op (`compiler="eager"`), from configurations with random weights; each in a process of
its own.
"""

from __future__ import annotations

import copy
import os
import random
import statistics
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
from autoremat.optimized import optimized_call
from autoremat.planning.nesting import Beside
from autoremat.session.session import Session
from tests.models import Case

PAGE = Path(__file__).parent / "varying_sizes.md"
STEPS, SEED, SHARE, TIME_LIMIT_S = 30, 18, 0.85, 2.0
WARM_UP = 10  # steps in which plans may be made
TIMED, ROUNDS = ((2, 20), (3, 40), (4, 64)), 15  # sizes, and how often each is timed
BATCH, SEQUENCE = (1, 4), (16, 64)

CASES: dict[str, Callable[[], Case]] = {
    "gpt2": partial(loss_alone, models.gpt2, "gpt2", layers=2, batch=1, tokens=SEQUENCE[1]),
    "llama": partial(loss_alone, models.llama, "llama", layers=2, batch=1, tokens=SEQUENCE[1]),
    "bert": partial(loss_alone, models.bert, "bert", layers=2, batch=1, tokens=SEQUENCE[1]),
    "t5": partial(loss_alone, solver_graphs.t5, "t5", layers=1, batch=1, tokens=SEQUENCE[1]),
    "vit": partial(loss_alone, solver_graphs.vit, "vit", layers=2, batch=1, size=64),
}
IMAGES = ("vit",)  # of which only the batch varies

INTRODUCTION = """# Sizes that vary

Batches end with a smaller one, and sequences differ in every step. Say how large they become, and
one plan is made for all sizes, in the first step, whatever its size is:

<!-- not run: the model is yours -->
```python
autoremat.optimize(model, "40GB", sizes={"batch": (1, 32), "sequence": (128, 4096)})
```

| written | means |
|---|---|
| `{"batch": (1, 32)}` | dimension 0 of every tensor that the model is called with |
| `{"sequence": (128, 4096)}` | dimension 1 of every tensor that has one |
| `{"images": {2: (224, 384)}}` | one input, by the name that `forward` or a dict gives it |
| `"seen"` | what has been seen, rounded up to powers of two |
| `torch._dynamo.mark_dynamic(t, 1, min=2, max=4096)` | the same for an input that is marked |

There are words for the two sizes that most models have in common, and names for all others, since
a model's third size has no word that everybody understands. What is said of an input by name comes
before the words. Marks count under `torch.compile(..., backend="autoremat")` too.

- **Within the range**, every step is within the budget. The plan is made for the largest sizes,
  and it is proven that no smaller ones peak higher: every value is largest there, rounding of the
  allocator included, and what is written over has room at every size. Workspaces of library calls
  are measured at the largest sizes and taken to be no more at smaller ones. Where it cannot be
  proven, the plan is simulated on a grid, made leaner if it is higher there, and each step is
  looked at; the report says which (`Sizes`). Nothing is padded.
- **Below the range**, steps run by the same plan.
- **Beyond it**, `autoremat.SizeError` is raised before the step runs, with the number.
  `on_larger="plan"` makes another plan instead, for the size rounded up to a power of two, or for
  the size alone where that does not fit.
- **On several ranks**, one whose batch is beyond the range raises alone, and the others wait for it
  until their process group's timeout: ask for `on_larger="plan"` where ranks see different sizes.
- **A range that does not fit** is refused in the first step (`InfeasibleBudget`), and the message
  names the largest sizes that do (`largest_sizes`).
- **What the model's own code makes of a size** (an assertion, a branch, a loop over it) may leave
  a smaller range, or one plan for each size. A warning, AR119, names the line. A size of 1 is code
  of its own for torch, and has a plan of its own.
- **After a graph break**, sizes are known by their numbers; the first step may be above the budget
  and is told of, as with any step of several graphs.
- **A loss outside** is seen in the first step, and taken to be as much more at the largest sizes
  as the product of all sizes is. One that grows with less than that gets more room than it needs.
- **Sizes that data decide** (`nonzero`) have no range: they are planned as they come.

Under Inductor the plan is made in the same way, and the peak is read from the generated code at
the largest sizes. That no smaller sizes peak higher is then proven of the graph's values, not of
the generated code's buffers. One small model is tested so: no step is above the budget, and the
peak at the largest sizes is the predicted one. A second plan may be made in the second step.

## Smaller sizes

A plan for the largest sizes recomputes at all sizes what only the largest have no room for. Where
that is more than 3 % of a step, up to three further plans are made for parts of the range, such as
a batch up to half of the largest, and each call runs by the fastest plan that its sizes allow:

- They are made before the third step, when two have shown what is held beside the graph, and never
  later. What they would save is told by simulating, before anything is searched for; a plan that
  saves less than 3 % in the end is dropped, and so is one that is not proven within the budget for
  all of its part. Each is compiled when a size first asks for it.
- The report tells of each (`Sizes`), and of its peak by a formula (`Report.smaller_formulas`; that
  of the plan for the largest sizes is `Report.peak_formula`).
- There are none for a step of several graphs, in checkpoints, for graphs that communicate between
  ranks, and where the user chose the plan. `sizes="seen"` has no smallest size, and none either.
- Parts are boxes, up to some batch and some length: a full batch of short sequences may run by the
  plan for long ones.

## Without a step being run

<!-- not run: the model is yours -->
```python
Dim = torch.export.Dim
batch, tokens = Dim("batch", max=32), Dim("tokens", max=4096)
autoremat.plan(model, ids, budget="40GB", sizes={"ids": {0: batch, 1: tokens}})
```

`autoremat plan TARGET --budget 40GB --sizes batch=1:32,sequence=128:4096` does the same; an input
and a dimension of it are written `images.2=224:384`. The batch is an example of any sizes from 2
on; of an `hf:` target it is the largest. The plan is for the largest sizes, and the report has the
proof (`Sizes`) and the formula. `optimize(sizes=)` takes dimensions of `torch.export` as well, as
`dynamic_shapes` has them by inputs' names; each needs a maximum.

## Steps of all sizes
"""

ABOUT = (
    f"{STEPS} steps of each model, of sizes drawn evenly from the range (seed {SEED}), the "
    f"last of the largest. Budgets are {SHARE:.0%} of what the step without a plan takes of "
    'that. Small models of one or two layers, float32, op by op (`compiler="eager"`), '
    f"`time_limit={TIME_LIMIT_S:.0f}`. What is measured is a whole step, resident included. "
    "Of a batch of 1, which has a plan of its own, the formula says nothing; where the first "
    "such batch is drawn late, its plan is made late.\n"
)
ABOUT_TIMES = (
    "Steps of three sizes (batch x sequence, of images the batch alone) are timed in turns "
    "with those of a model that was planned for the very size within the same budget: medians "
    f"of {ROUNDS} ratios, on a machine that others used meanwhile, so that a few percent are "
    "noise.\n"
)
ABOUT_NO_TIMES = (
    "These rows are of plans for the largest sizes alone: they were not run again since "
    "smaller sizes have plans of their own, and no step was timed.\n"
)


def largest_of(case: Case, batch: int, sequence: int) -> tuple[Tensor, ...]:
    """A batch: the case's first sample, so many times, and so many of its tokens."""
    found = []
    for given in case.inputs:
        repeated = given[:1].repeat(batch, *[1] * (given.dim() - 1))
        found.append(repeated[:, :sequence].contiguous() if given.dim() == 2 else repeated)
    return tuple(found)


def measured(model: torch.nn.Module, batch: tuple[Tensor, ...]) -> int:
    """The peak of a step in bytes, resident bytes included."""
    model.zero_grad(set_to_none=True)
    resident = autoremat.resident_nbytes(model, batch)
    return resident + autoremat.measure_peak(lambda: model(*batch).backward(), device="cpu")


def predicted(session: Session, step: dict[str, int]) -> int | None:
    """The peak by a plan for smaller sizes; None for a step that has none."""
    for part in session.steps.graphs.parts.values():
        names = part.covered.names if part.covered else {}
        if not part.smaller or any(name not in step for name in names.values()):
            continue
        numbers = {symbol: step[name] for symbol, name in names.items()}
        if part.for_call(numbers) is not part:
            return part.for_call(numbers).at(numbers).peak_nbytes(Beside())
    return None


def time_ratios(
    model: torch.nn.Module, untouched: torch.nn.Module, case: Case, budget: int
) -> dict[str, float]:
    """By size, a step's time by that of a plan made for this very size; run in turns."""

    def seconds(one: torch.nn.Module, batch: tuple[Tensor, ...]) -> float:
        one.zero_grad(set_to_none=True)
        began = time.perf_counter()
        one(*batch).backward()
        return time.perf_counter() - began

    found = {}
    for size in TIMED:
        batch = largest_of(case, *size)
        forget_plans()
        own = autoremat.optimize(
            copy.deepcopy(untouched),
            budget,
            compiler="eager",
            verbose=False,
            time_limit=TIME_LIMIT_S,
        )
        for one in (own, model) * 3:
            seconds(one, batch)
        pairs = [(seconds(model, batch), seconds(own, batch)) for _ in range(ROUNDS)]
        found[" x ".join(map(str, size))] = statistics.median(a / b for a, b in pairs)
    return found


def row_of(name: str) -> Row:
    """A model's steps of drawn sizes, each measured beside what was predicted of it."""
    forget_plans()
    torch.manual_seed(SEED)
    draw, case = random.Random(SEED), CASES[name]()
    sequences = (SEQUENCE[1],) * 2 if name in IMAGES else SEQUENCE
    sizes = {"batch": BATCH} | ({} if name in IMAGES else {"sequence": SEQUENCE})
    plain, untouched = copy.deepcopy(case.model), copy.deepcopy(case.model)
    top = largest_of(case, BATCH[1], SEQUENCE[1])
    measured(plain, top)
    budget = int(SHARE * measured(plain, top))
    del plain
    model = autoremat.optimize(
        case.model, budget, compiler="eager", sizes=sizes, verbose=False, time_limit=TIME_LIMIT_S
    )
    steps, plans = [], []
    for number in range(STEPS):
        size = draw.randint(*BATCH), draw.randint(*sequences)
        size = (BATCH[1], SEQUENCE[1]) if number == STEPS - 1 else size
        batch = largest_of(case, *size)
        if number < WARM_UP:  # what plans and compiles is not measured
            model.zero_grad(set_to_none=True)
            model(*batch).backward()
        session = optimized_call(model).session
        nbytes = measured(model, batch)
        parts = session.steps.graphs.parts.values()
        smaller = sum(len(part.smaller or ()) for part in parts)
        plans.append(len(parts) + smaller + session.steps.replans.count)
        steps.append({"batch": size[0], "sequence": size[1], "measured_nbytes": nbytes})
    report = autoremat.report(model)
    formula = report.peak_formula
    for step in steps if formula is not None else ():
        named = {s.name: step[s.name] for s in formula.symbols if s.name in ("batch", "sequence")}
        if all(s.lowest <= named.get(s.name, s.planned) for s in formula.symbols):
            step["predicted_nbytes"] = predicted(session, step) or formula.at(**named)
    return {
        "key": name,
        "model": name,
        "sizes": str(sizes),
        "budget_nbytes": budget,
        "predicted_nbytes": session.steps.peak_nbytes,
        "plans": plans,
        "highest_nbytes": max(step["measured_nbytes"] for step in steps),
        "proven": [fact.text for fact in report.facts if fact.name == "Sizes"],
        "formula": "" if formula is None else formula.text(),
        "fallbacks": [str(fallback) for fallback in report.fallbacks],
        "steps": steps,
        "time_ratios": time_ratios(model, untouched, case, budget),
    }


def _errors(row: Row) -> list[float]:
    found = [s for s in row.get("steps", ()) if "predicted_nbytes" in s]
    return [s["predicted_nbytes"] / s["measured_nbytes"] - 1 for s in found]


COLUMNS: Columns = {
    "model": lambda r: r["model"],
    "sizes": lambda r: f"`{r['sizes']}`" if is_done(r) else "",
    "budget MiB": lambda r: mib(r.get("budget_nbytes")),
    "highest step MiB": lambda r: mib(r.get("highest_nbytes")),
    "plans": lambda r: str(r["plans"][-1]) if is_done(r) else "",
    "steps predicted": lambda r: str(len(_errors(r))) if is_done(r) else "",
    "worst prediction": lambda r: percent(100 * max(e, key=abs)) if (e := _errors(r)) else "",
    "time by that of a plan for the size alone": lambda r: "; ".join(
        f"{size}: {ratio:.2f}" for size, ratio in r.get("time_ratios", {}).items()
    ),
    "": lambda r: "" if is_done(r) else r.get("message", r["status"]),
}


def _promises(done: list[Row]) -> Iterator[Promise]:
    """What is promised, and which rows keep it."""
    yield (
        "no step is above the budget",
        [(r["key"], r["highest_nbytes"] <= r["budget_nbytes"]) for r in done],
    )
    yield (
        f"at most four plans for each graph, all within the first {WARM_UP} steps",
        [(r["key"], r["plans"][WARM_UP - 1] == r["plans"][-1] <= 8) for r in done],
    )
    yield (
        "each step is predicted within 2 % by the plans in use at the end",
        [(r["key"], abs(error) <= 0.02) for r in done for error in _errors(r)],
    )


def page(runs: list[Row], rows: list[Row]) -> str:
    """The page."""
    done = [row for row in rows if is_done(row)]
    missing = "".join(f" {name}," for name in CASES if name not in {r["key"] for r in rows})
    told = [f"- {row['model']}: {text}" for row in done for text in row["fallbacks"]]
    return "\n".join(
        [
            INTRODUCTION,
            ABOUT,
            ABOUT_TIMES if any("time_ratios" in row for row in done) else ABOUT_NO_TIMES,
            table(COLUMNS, rows),
            verdicts(_promises(done)),
            "## What the reports say\n",
            *(f"- {row['model']}: {text}" for row in done for text in row["proven"]),
            "",
            *(["Told:\n", *told, ""] if told else []),
            "## How this was made\n",
            how_made(runs),
            "",
            f"Not run:{missing} GPUs, Inductor, lengths of a published data set.",
            "",
        ]
    )


if __name__ == "__main__":
    run(PAGE, page, list(CASES), row_of, ("plans", "message"))
