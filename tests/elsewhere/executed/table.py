"""The table of what was executed: `python -m tests.elsewhere.executed.table [CASE ...]`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.elsewhere.executed.cases import CASES, Case
from tests.elsewhere.executed.memory import in_order_of_making
from tests.elsewhere.executed.outcome import outcome_of
from tests.elsewhere.executed.work import Executor

_HEAD = """\
| step | GPU | peak: no plan; recompute all | events | gradients | kernels | on the CPU |
|---|---|---|---|---|---|---|"""


def main(*names: str) -> None:
    """A row for each case."""
    print(_HEAD)
    with tempfile.TemporaryDirectory() as folder, Executor(Path(folder)) as executor:
        for name in names or CASES:
            print(_row(name, CASES[name], executor), flush=True)


def _row(name: str, case: Case, executor: Executor) -> str:
    outcome = outcome_of(case, executor)
    pairs = list(zip(outcome.programs, outcome.ran, strict=True))
    peaks = "; ".join(_read_and_run(read.peak_nbytes, ran.peak_nbytes) for read, ran in pairs)
    are_as_read = all(
        in_order_of_making(read.events) == in_order_of_making(ran.events) for read, ran in pairs
    )
    count = sum(len(read.events) for read, _ in pairs)
    events = f"all {count:,} as read" if are_as_read else "**not as read**"
    changes = dict(outcome.changes())
    changed = {key: change for key, change in changes.items() if change}
    bits = f"{len(changes) - len(changed)} of {len(changes)} bit for bit"
    if changed:
        bits += f", others to {max(changed.values()):.0e}"
    error = max(error for _, error in outcome.errors())
    others = ", ".join(f"`{operator}`" for operator in sorted(outcome.ran[0].operators)) or "none"
    cells = (name, case.device, peaks, events, f"{bits}; eager's to {error:.0e}")
    return f"| {' | '.join(cells)} | {outcome.kernels} | {others} |"


def _read_and_run(read_nbytes: int, ran_nbytes: int) -> str:
    ran = "" if read_nbytes == ran_nbytes else f", **run: {ran_nbytes:,} B**"
    return f"{read_nbytes:,} B{ran}"


if __name__ == "__main__":
    main(*sys.argv[1:])
