"""The command line that scripts share which measure models of the benchmarks for a page.

Enters: a script's docstring, its usual models and its page. Leaves: a parser, and what it found.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmark_models import MODELS


def parser_of(doc: str | None, usual: Sequence[str], page: Path) -> argparse.ArgumentParser:
    """With all that such scripts have in common; parse by `parsed`."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--only", type=lambda text: text.split(";"), default=list(usual))
    parser.add_argument("--timeout", type=float, default=900.0, help="of a point, in seconds")
    parser.add_argument("--out", type=Path, default=page, help="the page; its rows lie beside it")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    parser.add_argument("--page", action="store_true", help="only rewrite the page from the rows")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What the command line says, of models that there are."""
    args = parser.parse_args()
    unknown = [name for name in args.only if name not in MODELS]
    if unknown:
        parser.error(f"Unknown model {unknown[0]!r}. There are: {'; '.join(MODELS)}.")
    return args
