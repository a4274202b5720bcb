"""`autoremat cache`: what is kept on this machine, and how to forget or carry it.

Enters: the command's arguments. Leaves: a table of files, the files of an export, and the exit
code. Guarantees: nothing is cleared unless that was asked for; an import replaces nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from autoremat.commands.exits import BAD_INPUT
from autoremat.cost.cache import CostCache
from autoremat.kept import Kept
from autoremat.planning.found_before import FoundBefore
from autoremat.units import format_nbytes

KINDS: tuple[type[Kept], ...] = (CostCache, FoundBefore)


def run(*, clear: bool, exported: Path | None, imported: Path | None, as_json: bool) -> int:
    """Do what the command says and return its exit code.

    Args:
        clear: whether to forget everything.
        exported: a folder to write the files to.
        imported: a folder with such files, to add.
        as_json: one JSON object in place of the text.
    """
    try:
        if clear:
            for kind in KINDS:
                kind.remove()
        added = {kind: _add(kind, imported) for kind in KINDS if imported is not None}
        if exported is not None:
            _export(exported)
    except (OSError, ValueError) as error:
        print(f"autoremat: {error}", file=sys.stderr)
        return BAD_INPUT
    rows = [_row(kind) | ({"added": added[kind]} if kind in added else {}) for kind in KINDS]
    if as_json:
        print(json.dumps({"files": rows}))
        return 0
    for row in rows:
        more = f", {row['added']} of them new" if "added" in row else ""
        size = format_nbytes(int(row["nbytes"]))
        print(f"{row['path']}: {row['count']} {row['what']}{more}, {size}")
    return 0


def _add(kind: type[Kept], folder: Path) -> int:
    if not (folder / kind.FILE).exists():
        raise ValueError(f"{folder} has no {kind.FILE}: give a folder that --export wrote.")
    with kind.open() as kept:
        return kept.merge(folder / kind.FILE)


def _export(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        if (folder / kind.FILE).exists():
            raise ValueError(f"{folder / kind.FILE} is there already: export to another folder.")
    for kind in KINDS:
        with kind.open() as kept:
            kept.copy(folder / kind.FILE)


def _row(kind: type[Kept]) -> dict[str, str | int]:
    path = kind.default_path()
    with kind.open() as kept:
        count = kept.count()
    nbytes = path.stat().st_size if path.exists() else 0
    return {"path": str(path), "what": kind.WHAT, "count": count, "nbytes": nbytes}
