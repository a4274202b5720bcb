"""What a GPU's allocator reserves, by setting: a table of plans that `autoremat plan` has written.

    autoremat plan hf:examples/llama_7b.json --batch 4 --seq 2048 --device H100 --budget 80GB \
        --optimizer AdamW --curve 0 --out llama_7b.report.json
    python docs/reserved.py llama_7b.report.json ...

Enters: report files. Leaves: a table in Markdown on standard output, one column for each, as
`docs/gpu_without_gpu.md` has it. Nothing is planned here.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from autoremat.reporting import Report, ReservedMemory
from autoremat.units import format_nbytes


def table(reports: dict[str, Report]) -> str:
    """The reports side by side, each by its name."""
    found = {name: _reserved(name, report) for name, report in reports.items()}
    rows = [
        ["", *found],
        ["---", *("---" for _ in found)],
        ["predicted peak", *(_size(report.predicted_peak_nbytes) for report in reports.values())],
        ["allocated, emulated", *(_size(one.default.allocated_nbytes) for one in found.values())],
        ["reserved, torch's defaults", *(_size(one.peak_nbytes) for one in found.values())],
        ["of it free at that peak", *(_size(one.idle_nbytes) for one in found.values())],
        ["largest free block then", *(_size(max(one.free_nbytes)) for one in found.values())],
        ["segments", *(str(one.default.segments) for one in found.values())],
    ]
    for number, case in enumerate(next(iter(found.values())).cases[1:], start=1):
        rows.append([f"`{case.setting}`", *(_against(one, number) for one in found.values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _reserved(name: str, report: Report) -> ReservedMemory:
    if report.reserved is None:
        raise SystemExit(f"{name} is no plan for a GPU: nothing is reserved in it.")
    return report.reserved


def _size(nbytes: int) -> str:
    return format_nbytes(nbytes, digits=2)


def _against(found: ReservedMemory, number: int) -> str:
    more_nbytes = found.cases[number].peak_nbytes - found.peak_nbytes
    sign = "+" if more_nbytes > 0 else "\N{MINUS SIGN}" if more_nbytes < 0 else ""
    return f"{sign}{_size(abs(more_nbytes))}"


def main() -> None:
    """Read the files and print the table."""
    parser = argparse.ArgumentParser(description="What a GPU's allocator reserves, by setting.")
    parser.add_argument("reports", nargs="+", type=Path)
    paths = parser.parse_args().reports
    print(table({p.name.split(".")[0]: Report.from_json(p.read_text("utf-8")) for p in paths}))


if __name__ == "__main__":
    main()
