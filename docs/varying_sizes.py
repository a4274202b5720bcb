"""Regenerate `varying_sizes.md`, its picture, and the rows beside it, `varying_sizes.json`.

    python docs/varying_sizes.py [--only CASE;...] [--resume] [--page]

One plan for a range of sizes, held against what is measured: each model is optimised with `sizes=`,
its batches come as they do in training (`varied_batches.py`), and every step is measured. Small
models on one thread, from configurations with random weights; each in a process of its own. A case
is a model, op by op (`compiler="eager"`), or a model and `inductor`: `gpt2`, `gpt2, inductor`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from measured_models import run
from own_process import forget_plans
from page_tables import Columns, Promise, how_made, is_done, mib, percent, table, verdicts
from row_store import Row
from timed_sizes import REPEATS, ROUNDS, TIME_LIMIT_S, of_key, optimized, over_alone, seconds_of
from torch import nn
from varied_batches import BATCH, CASES, EPOCH, LAST, LONGEST, SHORTEST, SIDES, Batch, Size, Varied
from varying_sizes_plot import draw

import autoremat
from autoremat.optimized import optimized_call
from autoremat.planning.nesting import Beside
from autoremat.planning.part import Part
from autoremat.session.session import Session

PAGE = Path(__file__).parent / "varying_sizes.md"
STEPS, SHARE = 48, 0.75
PLANNING = 3  # calls of a size until all that plans because of it has planned
PLANNED_IN, MOST_PLANS = 10, 4  # steps in which plans of a graph may be made, and how many
CURVE = 25  # sizes of a line in the picture
COMPILED = ("gpt2", "llama", "vit", "unet")  # under Inductor as well
KEYS = [*CASES, *(f"{model}, inductor" for model in COMPILED)]

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
  are measured at the largest sizes and, of calls that have one there, at the smallest: the higher
  one counts, and they are taken to be no more in between. Where it cannot be proven, the plan is
  simulated on a grid, made leaner if it is higher there, and each step is looked at; the report
  says which (`Sizes`). Nothing is padded.
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
that is more than 3 % of a step (op by op 0.2 %, where a part needs no recompute), up to three
further plans are made for parts of the range, such as a batch up to half of the largest, and each
call runs by the fastest plan that its sizes allow:

- They are made before the third step, when two have shown what is held beside the graph, and never
  later. What they would save is told by simulating, before anything is searched for; a plan that
  saves less in the end is dropped, and so is one that is not proven within the budget for all of
  its part. Each is compiled when a size first asks for it.
- Of a step of one graph, a part in which nothing has to be recomputed is as large as that allows,
  and where a plan is dropped, another part may be worth one.
- The report tells of each (`Sizes`), and of its peak by a formula (`Report.smaller_formulas`; that
  of the plan for the largest sizes is `Report.peak_formula`).
- The graphs of a step that has up to four, after a graph break, are planned together for the same
  parts of the ranges. Such a part is left out if the step is above the budget by these plans, or
  where only some of its graphs run by them, as one does not whose code cannot be compiled.
- There are none in checkpoints, for a graph that runs several times in a step, once calls of one
  step were of several sizes, for graphs that communicate between ranks or several on ranks, and
  where the user chose the plan. `sizes="seen"` has no smallest size, and none either.
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
    f"{STEPS} steps of each model, op by op or under Inductor. An epoch has {EPOCH} batches of "
    f"{BATCH} samples, the last of {LAST}; behind each epoch the model is evaluated. Text is "
    f"padded to the longest of its batch; lengths, up to {LONGEST} tokens, are those of a "
    "published set of instructions (deciles: `docs/varied_batches.py`), in ranges from "
    f"{SHORTEST} on. Images are square, of {SIDES[0]} to {SIDES[1]} pixels. The last step is of "
    f"the largest sizes, and budgets are {SHARE:.0%} of what the step without a plan takes of "
    "these, by `torch.compile` where ours is under Inductor. Small models of one or two layers (T5 "
    "of one in the encoder and one in the decoder), float32, one thread, "
    f"`time_limit={TIME_LIMIT_S:.0f}`. What is measured is a whole step, resident included. "
    "**Planning** is the time of the steps that planned, plans for smaller sizes included, less "
    "what they take later. The Vision Transformer leaves out its interpolation at the size that it "
    "was made for, which is a second graph. GPT-2 in two graphs has a graph break before its loss. "
    "Under Inductor what is predicted is what was read at the largest sizes, less what "
    "simulating the plan says of smaller ones.\n"
)
ABOUT_TIMES = (
    "**Time**: steps of three sizes (batch x length or side) by those of a model whose plan was "
    "made for this very size within the same budget, in a process of its own. All take their steps "
    f"in turns, and the median of {REPEATS * ROUNDS} ratios is given, {ROUNDS} of each of "
    f"{REPEATS} models with that plan: where their memory lies makes a percent. What is compiled "
    "for one size has numbers where that for a range has arithmetic on sizes: beside it is what "
    "`torch.compile` alone takes with `dynamic=True` by what it takes with `dynamic=False` "
    "(backend `aot_eager`, or Inductor), without a plan. GPT-2 under Inductor is of an older run: "
    "40 ratios of one model, and the planning of first calls alone.\n"
)


def nbytes_of(model: nn.Module, batch: Batch) -> int:
    """The peak of a step in bytes, resident bytes included."""
    model.zero_grad(set_to_none=True)
    resident = autoremat.resident_nbytes(model, batch)
    return resident + autoremat.measure_peak(lambda: model(*batch).backward(), device="cpu")


def evaluate(model: nn.Module, batch: Batch) -> None:
    """A forward as between two epochs."""
    model.eval()
    with torch.no_grad():
        model(*batch)
    model.train()


def predicted(session: Session, report: autoremat.Report, step: Size) -> int | None:
    """The peak in bytes by the plan that a step of this size runs by; None where nobody says."""
    ran = {name: session.steps.graphs.parts[name] for name in session.steps.graphs.graphs}
    if len(ran) != 1:
        return _predicted_together(session, ran, step)
    (part,) = ran.values()
    names = part.covered.names if part.covered else {}
    is_read = session.options.setting.reads_inductor  # no formula is that of generated code
    if names and (part.smaller or is_read) and all(name in step for name in names.values()):
        numbers = {symbol: step[name] for symbol, name in names.items()}
        if is_read or part.for_call(numbers) is not part:
            return part.for_call(numbers).at(numbers).peak_nbytes(Beside())
    formula = report.peak_formula
    if formula is None:
        return None
    known = {symbol.name: symbol for symbol in formula.symbols}
    named = {name: size for name, size in step.items() if name in known}
    is_said = all(name in step or symbol.follows in step for name, symbol in known.items())
    is_within = all(known[name].lowest <= size for name, size in named.items())
    return formula.at(**named) if is_said and is_within else None


def _predicted_together(session: Session, ran: Mapping[str, Part], step: Size) -> int | None:
    """The same of several graphs, each by the plan for a call of this size."""
    graphs = session.steps.graphs.apart()
    for name, part in ran.items():
        names = part.covered.names if part.covered else {}
        if not all(size in step for size in names.values()):
            return None
        numbers = {symbol: step[size] for symbol, size in names.items()}
        graphs.parts[name] = part.for_call(numbers).at(numbers)
    return graphs.graphs_peak_nbytes(session.steps.surroundings.now)


def plans_of(model: nn.Module, size: Size) -> Row:
    """How many there are now, replaced ones included, of how many graphs; what they predict."""
    session = optimized_call(model).session
    parts = session.steps.graphs.parts.values()
    smaller = sum(len(part.smaller or ()) for part in parts)
    return {
        "graphs": len(parts),
        "plans": len(parts) + smaller + session.steps.replans.count,
        "predicted_nbytes": predicted(session, autoremat.report(model), size),
    }


def timed(case: Varied) -> list[Size]:
    """Three sizes: an epoch's last batch of the smallest, a usual one, and the largest."""
    drawn = sorted(size[case.over] for size in case.drawn(STEPS) if size["batch"] == BATCH)
    small = min(size[case.over] for size in case.drawn(STEPS))
    usual = drawn[len(drawn) // 2]
    return [{"batch": LAST, case.over: small}, {"batch": BATCH, case.over: usual}, case.largest]


def name_of(size: Size) -> str:
    """For tables."""
    return " x ".join(map(str, size.values()))


def budget_of(case: Varied, compiler: str) -> int:
    """In bytes: a share of what the step without a plan takes of the largest sizes."""
    plain, largest = case.model(), case.batch(case.largest)
    if compiler == "inductor":
        plain = torch.compile(plain)
    nbytes_of(plain, largest)
    found = int(SHARE * nbytes_of(plain, largest))
    torch.compiler.reset()
    return found


def row_of(key: str) -> Row:
    """A model's steps, each measured beside what was predicted of it."""
    forget_plans()
    name, compiler = of_key(key)
    case = CASES[name]
    budget = budget_of(case, compiler)
    torch.manual_seed(0)
    model = optimized(case, budget, compiler, sizes=case.sizes)
    steps: list[Row] = []
    for number, size in enumerate(case.drawn(STEPS)):
        batch = case.batch(size)
        # What plans and compiles is not measured, nor what plans for smaller sizes then.
        took_s = sum(seconds_of(model, batch) for _ in range(PLANNING))
        steps.append({**size, "measured_nbytes": nbytes_of(model, batch)})
        steps[-1] |= plans_of(model, size)  # before a further step may plan
        steps[-1]["planning_s"] = took_s - PLANNING * seconds_of(model, batch)
        if number % EPOCH == EPOCH - 1:
            evaluate(model, batch)
    session, report = optimized_call(model).session, autoremat.report(model)
    curves = {
        str(count): _curve(case, count, partial(predicted, session, report))
        for count in (LAST, BATCH)
    }
    row = {
        "key": key,
        "model": key,
        "over": case.over,
        "sizes": _written(case),
        "budget_nbytes": budget,
        "highest_nbytes": max(step["measured_nbytes"] for step in steps),
        "proven": [fact.text for fact in report.facts if fact.name == "Sizes"],
        "formula": "" if report.peak_formula is None else report.peak_formula.text(),
        "fallbacks": [str(fallback) for fallback in report.fallbacks],
        "steps": steps,
        "curves": curves,
    }
    del session, report
    ratios = {name_of(size): over_alone(model, key, budget, size) for size in timed(case)}
    return {
        **row,
        "time_ratios": {name: ratio.planned for name, ratio in ratios.items()},
        "torchs_ratios": {name: ratio.torchs for name, ratio in ratios.items()},
    }


def _written(case: Varied) -> str:
    low, high = (SHORTEST, LONGEST) if case.over == "sequence" else SIDES
    return f"batch 1 to {BATCH}, {case.over} {low} to {high}"


def _curve(
    case: Varied, count: int, nbytes: Callable[[Size], int | None]
) -> list[tuple[int, int | None]]:
    """A batch's peak by formula, over the other size."""
    low, high = (SHORTEST, LONGEST) if case.over == "sequence" else SIDES
    sizes = sorted({low + (high - low) * n // (CURVE - 1) for n in range(CURVE)})
    sizes = sorted({size // case.multiple * case.multiple for size in sizes})
    return [(size, nbytes({"batch": count, case.over: size})) for size in sizes]


def errors(row: Row) -> list[float]:
    """Of predictions, relative to what was measured."""
    found = [s for s in row.get("steps", ()) if s["predicted_nbytes"] is not None]
    return [s["predicted_nbytes"] / s["measured_nbytes"] - 1 for s in found]


def planning_s(row: Row) -> float:
    """Seconds of the steps that planned, less what they take later."""
    steps, before, found = row["steps"], 0, 0.0
    for step in steps:
        if step["plans"] > before:
            found += step["planning_s"]
        before = step["plans"]
    return found


COLUMNS: Columns = {
    "model": lambda r: r["model"],
    "sizes": lambda r: r.get("sizes", ""),
    "budget MiB": lambda r: mib(r.get("budget_nbytes")),
    "highest step MiB": lambda r: mib(r.get("highest_nbytes")),
    "plans": lambda r: str(r["steps"][-1]["plans"]) if is_done(r) else "",
    "graphs": lambda r: str(r["steps"][-1]["graphs"]) if is_done(r) else "",
    "the last plan in step": lambda r: str(_latest(r, "plans")) if is_done(r) else "",
    "planning s": lambda r: f"{planning_s(r):.0f}" if is_done(r) else "",
    "steps predicted": lambda r: str(len(errors(r))) if is_done(r) else "",
    "worst prediction": lambda r: percent(100 * max(e, key=abs)) if (e := errors(r)) else "",
    "time by that of a plan for the size alone": lambda r: _listed(r, "time_ratios"),
    "the same of torch's own code": lambda r: _listed(r, "torchs_ratios"),
    "": lambda r: "" if is_done(r) else r.get("message", r["status"]),
}


def _listed(row: Row, ratios: str) -> str:
    return "; ".join(f"{size}: {ratio:.3f}" for size, ratio in row.get(ratios, {}).items())


def _latest(row: Row, of: str) -> int:
    """The step since which there are no more of something."""
    counts = [step[of] for step in row["steps"]]
    return counts.index(counts[-1]) + 1


def _is_soon_planned(row: Row) -> bool:
    graphs, plans = (row["steps"][-1][of] for of in ("graphs", "plans"))
    is_soon = _latest(row, "plans") <= _latest(row, "graphs") + PLANNED_IN
    return bool(plans <= MOST_PLANS * graphs and is_soon)


def _promises(done: list[Row]) -> Iterator[Promise]:
    """What is promised, and which rows keep it."""
    yield (
        "no step is above the budget",
        [(r["key"], r["highest_nbytes"] <= r["budget_nbytes"]) for r in done],
    )
    yield (
        f"at most {MOST_PLANS} plans for each graph, within {PLANNED_IN} steps",
        [(r["key"], _is_soon_planned(r)) for r in done],
    )
    yield (
        "each step is predicted within 2 %",
        [(r["key"], abs(error) <= 0.02) for r in done for error in errors(r)],
    )
    yield (
        "each step has a prediction",
        [(r["key"], len(errors(r)) == len(r["steps"])) for r in done],
    )
    yield (
        "at most 2 % slower than a plan for the size alone",
        [
            (f"{r['key']} {size}", ratio <= 1.02)
            for r in done
            for size, ratio in r["time_ratios"].items()
        ],
    )
    yield (
        "at most 2 % above the same ratio of torch's own code",
        [
            (f"{r['key']} {size}", r["time_ratios"][size] <= 1.02 * ratio)
            for r in done
            for size, ratio in r.get("torchs_ratios", {}).items()
        ],
    )


def page(runs: list[Row], rows: list[Row]) -> str:
    """The page; draws its picture."""
    done = [row for row in rows if is_done(row)]
    draw(done, PAGE.with_suffix(".svg"))
    missing = "".join(f" {name}," for name in KEYS if name not in {r["key"] for r in rows})
    told = [f"- {row['model']}: {text}" for row in done for text in row["fallbacks"]]
    return "\n".join(
        [
            INTRODUCTION,
            ABOUT,
            ABOUT_TIMES,
            table(COLUMNS, rows),
            verdicts(_promises(done)),
            "![Steps measured, and the formulas of their plans](varying_sizes.svg)\n",
            "Dots are steps as measured, lines the formulas of the plans in use at the end, for "
            f"batches of {LAST} and of {BATCH}.\n",
            "## What the reports say\n",
            *(f"- {row['model']}: {text}" for row in done for text in row["proven"]),
            "",
            *(["Told:\n", *told, ""] if told else []),
            "## How this was made\n",
            how_made(runs),
            "",
            f"Not run:{missing} GPUs.",
            "",
        ]
    )


if __name__ == "__main__":
    run(PAGE, page, KEYS, row_of, ("highest_nbytes", "message"))
