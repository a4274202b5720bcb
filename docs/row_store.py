"""What the benchmark scripts share: rows that survive a crash, and what machine they are from.

Enters: rows with a `key`, as they come. Leaves: a JSON file of runs and rows, and the page that is
made from them, both written after each row.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Page = Callable[[list[Row], list[Row]], str]


class Store:
    """The rows of all runs, by key, written to disk after each change.

    Args:
        path: the JSON file; the page lies beside it, with suffix `.md`.
        page: from runs and rows to the page's text.
        run: what describes the rows that are going to be added.
        order: the keys to keep, in their order; None keeps all as they came.
    """

    def __init__(
        self, path: Path, page: Page, run: Row, *, order: Iterable[str] | None = None
    ) -> None:
        stored = json.loads(path.read_text()) if path.exists() else {"runs": [], "rows": []}
        self.runs: list[Row] = [*stored["runs"], run]
        self.rows: dict[str, Row] = {row["key"]: row for row in stored["rows"]}
        self._path, self._page = path, page
        self._order = None if order is None else list(order)

    def add(self, row: Row) -> None:
        """Add or replace a row, and write rows and page; a row that names its run keeps it."""
        self.rows[row["key"]] = {"run": len(self.runs) - 1, **row}
        self.write()

    def write(self) -> None:
        """Write rows and page, dropping runs that no row is from."""
        keys = self.rows if self._order is None else self._order
        rows = [self.rows[key] for key in keys if key in self.rows]
        renumbered = {old: new for new, old in enumerate(sorted({row["run"] for row in rows}))}
        runs = [self.runs[old] for old in renumbered]
        rows = [{**row, "run": renumbered[row["run"]]} for row in rows]
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"runs": runs, "rows": rows}, indent=1) + "\n")
        temporary.replace(self._path)
        self._path.with_suffix(".md").write_text(self._page(runs, rows))


def describe(script: str, packages: Iterable[str], **settings: Any) -> Row:
    """What a reader needs to repeat or to doubt the figures.

    Folders in the command line are those of one machine, so they are left out.
    """
    options = shlex.join("DIR" if os.sep in word else word for word in sys.argv[1:])
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python docs/{script} {options}".strip(),
        **settings,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": platform.system(),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
