"""Regenerate `steps.md` and the rows beside it, `steps.json`.

    python docs/steps_sweep.py [--count 200] [--seed 0] [--only FORM,...] [--resume]
    python docs/steps_sweep.py --case 17        # one case again, its row printed
    python docs/steps_sweep.py --device cuda --wider 8 --out gpu.md  # where there is a GPU

Each case is a random model, a form of a step and a budget (`steps_worker.py`), and runs in a
process of its own, one after the other, on one thread. One that crashes or passes `--timeout` is a
row that says so. Rows are stored as they come; `--resume` runs only what is missing or failed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Asking for a GPU shall not start CUDA where processes are forked from.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

from own_process import in_own_process
from row_store import Row, Store, describe
from steps_forms import FORMS
from steps_page import over_budget, page, verdict
from steps_worker import TOLERANCE, Case, row_of

PAGE = Path(__file__).parent / "steps.md"
PRELOADED = ["steps_worker", "autoremat.api", "autoremat._torch.compiling"]


def cases(args: argparse.Namespace) -> list[Case]:
    """Every form in turn, so that each has as many cases as the others, or one more."""
    forms = list(FORMS)
    found = [
        Case(
            number,
            args.seed,
            forms[number % len(forms)],
            args.compiler,
            args.time_limit,
            device=args.device,
            wider=args.wider,
        )
        for number in range(args.count)
    ]
    return [case for case in found if case.form in args.only]


def summary(row: Row) -> str:
    """One line for the terminal."""
    if row["status"] != "ok":
        return f"{row['status']}: {row['message']}"
    share = over_budget(row)
    return (
        f"{row['verdict']:22s} {'-' if share is None else f'{share:.3f}'} of "
        f"{row['budget_nbytes']} B ({row['through']}, asked {row['share']:.2f} of eager's peak), "
        f"gradient {row['gradient_error'] or 0.0:.0e}, {row['seconds']:.1f} s"
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="of cases, over all forms")
    parser.add_argument("--seed", type=int, default=0, help="of models and budgets")
    parser.add_argument("--only", type=lambda text: text.split(","), help="forms, with commas")
    parser.add_argument("--case", type=int, help="run one case, print its row, store nothing")
    parser.add_argument("--compiler", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--wider", type=int, default=1, help="models, by this factor")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page; its rows lie beside it")
    parser.add_argument("--time-limit", type=float, default=1.0, help="of a solve, in seconds")
    parser.add_argument("--timeout", type=float, default=120.0, help="of a case, in seconds")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    parser.add_argument("--page", action="store_true", help="only rewrite the page from the rows")
    args = parser.parse_args()
    args.only = args.only or list(FORMS)
    unknown = [form for form in args.only if form not in FORMS]
    if unknown:
        parser.error(f"Unknown form {unknown[0]!r}. There are: {', '.join(FORMS)}.")
    return args


def main() -> None:
    """Run what the command line asks for."""
    args = arguments()
    if args.case is not None:
        args.count = args.case + 1
        print(json.dumps(row_of(cases(args)[-1]), indent=1))
        return
    settings = {name: getattr(args, name) for name in ("seed", "time_limit", "timeout")}
    run = describe("steps_sweep.py", ("torch", "highspy"), **settings)
    sentences = {name: form.sentence for name, form in FORMS.items()}
    store = Store(args.out.with_suffix(".json"), partial(page, forms=sentences), run)
    for case in cases(args):
        if args.page or (args.resume and store.rows.get(case.key, {}).get("status") == "ok"):
            continue
        facts = {"key": case.key, "form": case.form, "number": case.number, "seed": case.seed}
        facts |= {"compiler": case.compiler, "tolerance": TOLERANCE}
        row = {**facts, **in_own_process(row_of, case, args.timeout, PRELOADED)}
        store.add(row)
        print(f"{case.number:4d} {case.form:22s} {summary(row)}", flush=True)
    store.write()
    print(dict(Counter(map(verdict, store.rows.values()))))


if __name__ == "__main__":
    main()
