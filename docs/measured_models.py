"""The command of a page whose rows are models: each is measured in a process of its own.

Enters: the models' names, and what makes a row of one. Leaves: the page, and its rows in a file.
Guarantees: rows and page are written after each model, so a run that is cut short loses one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from own_process import in_own_process
from row_store import Page, Row, Store, describe

PRELOADED = ("autoremat.api", "transformers")


def run(
    path: Path, page: Page, names: Sequence[str], row_of: Callable[[str], Row], shown: Sequence[str]
) -> None:
    """Run the models that were asked for, one after the other.

    Args:
        path: of the page; its rows lie beside it, and its script has its name.
        page: from runs and rows to its text.
        names: of the models, in their order.
        row_of: makes a model's row, and is found by its name.
        shown: columns to print as a row comes.
    """
    parser = argparse.ArgumentParser(description=f"Makes {path.name}.")
    parser.add_argument("--only", type=lambda text: text.split(";"), default=list(names))
    parser.add_argument("--timeout", type=float, default=900.0, help="of a model, in seconds")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    parser.add_argument("--page", action="store_true", help="only rewrite the page from the rows")
    args = parser.parse_args()
    describes = describe(f"{path.stem}.py", ("torch", "transformers", "highspy"))
    store = Store(path.with_suffix(".json"), page, describes, order=names)
    if args.page:
        store.write()
        return
    for name in args.only:
        if args.resume and store.rows.get(name, {}).get("status") == "ok":
            continue
        row = in_own_process(row_of, name, args.timeout, PRELOADED)
        store.add({"key": name, "model": name, **row})
        print(name, row.get("status"), *(row.get(column) for column in shown), flush=True)
