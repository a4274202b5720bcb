"""`autoremat compare`: a target's step under autoremat and under what else there is.

Enters: the command's arguments. Leaves: a table or one JSON object on stdout, progress and
messages on stderr, perhaps a plot, and the exit code. Guarantees: what cannot be used is found
before anything is measured; after Ctrl-C what was measured is printed, and no process stays.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from autoremat.ask.budget import budget_argument
from autoremat.commands.exits import BAD_INPUT
from autoremat.commands.files import OutputError, check_writable, write_whole
from autoremat.commands.interrupt import INTERRUPTED
from autoremat.comparison.plot import MARK
from autoremat.comparison.race import ComparisonError, Options, Race
from autoremat.comparison.table import comparison_table
from autoremat.comparison.variants import chosen_variants
from autoremat.targets.arguments import TargetArguments


def run(
    target: TargetArguments,
    *,
    budgets: str,
    variants: str | None,
    compiler: str,
    rounds: int,
    time_limit: float,
    timeout: float,
    alone: bool,
    picture: Path | None,
    force: bool,
    as_json: bool,
) -> int:
    """Do what the command says and return its exit code.

    Args:
        target: where model and batch come from.
        budgets: of autoremat, separated by commas.
        variants: what else to measure, separated by commas; None for all.
        compiler: "inductor" or "eager".
        rounds: timed steps of each variant.
        time_limit: seconds to choose a plan, per graph.
        timeout: seconds for one variant to be measured.
        alone: time each variant before the next is built.
        picture: where to write the plot.
        force: whether a file that is not ours may be replaced.
        as_json: one JSON object in place of the table.
    """
    try:
        if picture is not None:
            check_writable(picture, MARK.encode(), force=force)
        chosen = chosen_variants(
            None if variants is None else _listed(variants),
            [budget_argument(text) for text in _listed(budgets)],
            compiler,
        )
        options = Options(rounds=rounds, time_limit=time_limit, timeout=timeout, alone=alone)
        race = Race(target.to_text(), chosen, options)
        code = _raced(race)
        _tell(race, picture, as_json)
    except (ValueError, ComparisonError, OutputError) as error:
        print(f"autoremat: {error}", file=sys.stderr)
        return BAD_INPUT
    return code


def _raced(race: Race) -> int:
    try:
        race.run()
    except KeyboardInterrupt:
        print("autoremat: Interrupted: what follows was measured before.", file=sys.stderr)
        return INTERRUPTED
    return 0


def _tell(race: Race, picture: Path | None, as_json: bool) -> None:
    comparison = race.result()
    if as_json:
        print(comparison.to_json())
    else:
        console = Console()
        console.print(comparison_table(comparison, console.width))
    if picture is None:
        return
    if not comparison.yardstick:
        print("autoremat: No step was timed, so there is no plot.", file=sys.stderr)
        return
    write_whole(picture, comparison.to_svg().encode())
    if not as_json:
        print(f"Plot written to {picture}")


def _listed(text: str) -> Sequence[str]:
    return [part for part in (part.strip() for part in text.split(",")) if part]
