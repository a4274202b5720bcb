"""The command line: `autoremat solve`, `autoremat verify`, `autoremat compare`.

Enters: arguments. Leaves: a result on stdout, messages on stderr, and an exit code: 0 for success,
1 for input that cannot be used, 2 for a budget that no plan found fits, 3 for a verification that
failed, 130 after Ctrl-C.
Guarantees: importing this needs no torch; a command imports what it needs when it runs.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from autoremat.commands.interrupt import INTERRUPTED, SENTENCE, leaving_at_once
from autoremat.dropout_policy import DropoutPolicy

BAD_INPUT, INFEASIBLE, DIFFERENT = 1, 2, 3

# One line per paragraph: typer keeps the line breaks inside them.
_SOLVE_HELP = "\n\n".join(
    [
        "Plan which operations of a graph to run again, so that its peak fits a budget.",
        "[bold]PROBLEM[/] is a JSON file: a networkx node-link graph with [bold]time[/] and "
        "[bold]nbytes[/] per node (and perhaps [bold]phase[/], forward or backward), or a problem "
        "in autoremat's own schema. An edge leads from a producer to its reader.",
        "The baseline is the graph without recompute: every operation once, in the file's order.",
        "[bold]Examples[/]",
        "  autoremat solve graph.json --budget 60%",
        "  autoremat solve graph.json --budget 12GiB --out plan.json",
        "  autoremat solve graph.json --budget 123456 --json",
        "  autoremat solve graph.json --pareto --time-limit 120",
        "[bold]Exit codes[/]",
        "  0  a plan within the budget",
        "  1  input that cannot be used",
        "  2  no plan found fits the budget",
        "  130  interrupted with Ctrl-C",
    ]
)

_VERIFY_HELP = "\n\n".join(
    [
        "Check on one training step that the gradients are those of eager mode and that the "
        "measured peak is within a budget.",
        "[bold]TARGET[/] is [bold]path/to/file.py:function[/] or "
        "[bold]package.module:function[/]. The function takes no arguments and returns "
        "(model, inputs) or (model, inputs, loss_fn): inputs is a tensor, a tuple of tensors "
        "(positional) or a dict of them (keywords); without loss_fn(output) the model returns its "
        "loss, or an output with .loss. It runs as a script of yours does.",
        "The step runs once in eager mode as well, so it has to fit without a plan.",
        "[bold]Examples[/]",
        "  autoremat verify examples/train_gpt.py:make --budget 150MiB",
        "  autoremat verify my_package.models:small --budget 80%",
        "  autoremat verify model.py:make --budget 12GiB --compiler eager --json",
        "[bold]Exit codes[/]",
        "  0  the same results, within the budget",
        "  1  input that cannot be used",
        "  2  no plan found fits the budget",
        "  3  a difference, or a measured peak above the budget",
        "  130  interrupted with Ctrl-C",
    ]
)

_COMPARE_HELP = "\n\n".join(
    [
        "Measure a training step under autoremat's budgets and under what else there is: peak, "
        "step time, samples per second, and the first step, which plans and compiles.",
        "[bold]TARGET[/] is a function as for [bold]autoremat verify[/]. It is called anew in a "
        "process of its own for each variant, one after the other; then one step of each is timed "
        "in turn. A variant that fails is a row that says why. The step is forward and backward, "
        "without an optimizer.",
        "[bold]Variants[/]: every-layer, every-2 (or another number: one checkpoint for so many "
        "layers), sqrt, selective-attention (checkpoints that save matrix products and attention), "
        "compile (torch.compile), torch:0.5 (its activation_memory_budget). Without --variants all "
        "of these and torch:0.1; with --compiler eager those that need no Inductor. Eager mode is "
        "always measured.",
        "[bold]Examples[/]",
        "  autoremat compare examples/train_gpt.py:make",
        "  autoremat compare examples/train_gpt.py:make --plot gpt.svg --json",
        "  autoremat compare model.py:make --budgets 50%,12GiB,smallest --variants sqrt,compile",
        "  autoremat compare model.py:make --compiler eager --rounds 3",
        "[bold]Exit codes[/]",
        "  0  measured, whatever the rows say",
        "  1  input that cannot be used",
        "  130  interrupted with Ctrl-C; what was measured is printed",
    ]
)


class Compiler(StrEnum):
    """What runs the planned graphs."""

    INDUCTOR = "inductor"
    EAGER = "eager"


class _Commands(TyperGroup):
    """Commands whose usage errors exit with 1, since 2 means that no plan fits."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except SystemExit as end:
            # Both the exit code of a command and a usage error end here; the cause tells.
            if end.code == INFEASIBLE and not isinstance(end.__context__, typer.Exit):
                raise SystemExit(BAD_INPUT) from None
            raise


app = typer.Typer(
    cls=_Commands,
    help="Training steps that stay within a memory budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(help=_SOLVE_HELP, no_args_is_help=True)
def solve(
    problem: Annotated[Path, typer.Argument(help="The graph, as JSON.", metavar="PROBLEM")],
    budget: Annotated[
        str | None,
        typer.Option(
            help="Highest peak allowed: 12GiB, 1.5GB, 123456 (bytes), or 60% of the peak "
            "without recompute.",
            show_default=False,
        ),
    ] = None,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="The whole curve of peak and time; no --budget.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the plan to this JSON file.", show_default=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout in place of the table.")
    ] = False,
    time_limit: Annotated[
        float, typer.Option(help="Seconds; 0 takes the best of the simple strategies.", min=0.0)
    ] = 30.0,
) -> None:
    """Parse, solve, print: see `commands.solve`."""
    try:
        with leaving_at_once():
            from autoremat.commands.solve import run

        code = run(problem, budget, pareto=pareto, out=out, as_json=as_json, time_limit=time_limit)
    except KeyboardInterrupt:
        typer.echo(SENTENCE, err=True)
        code = INTERRUPTED
    raise typer.Exit(code)


@app.command(help=_VERIFY_HELP, no_args_is_help=True)
def verify(
    target: Annotated[
        str, typer.Argument(help="The function that makes model and batch.", metavar="TARGET")
    ],
    budget: Annotated[
        str,
        typer.Option(
            help="Highest peak allowed: 12GiB, 1.5GB, 123456 (bytes), or 80% of the device's "
            "memory.",
            show_default=False,
        ),
    ],
    compiler: Annotated[
        Compiler, typer.Option(help="What runs the planned graphs; eager compiles fast.")
    ] = Compiler.INDUCTOR,
    dropout: Annotated[
        DropoutPolicy | None,
        typer.Option(
            help="Draw random numbers again where that is safe, or keep what was drawn; without "
            "it, the safe choice for the device.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout in place of the table.")
    ] = False,
    time_limit: Annotated[
        float, typer.Option(help="Seconds for the solver, per graph.", min=0.0)
    ] = 30.0,
) -> None:
    """Load, plan, compare, print: see `commands.verify`."""
    try:
        with leaving_at_once():
            from autoremat.commands.verify import run

        code = run(
            target,
            budget,
            compiler=compiler,
            dropout=dropout,
            as_json=as_json,
            time_limit=time_limit,
        )
    except KeyboardInterrupt:
        typer.echo(SENTENCE, err=True)
        code = INTERRUPTED
    raise typer.Exit(code)


@app.command(help=_COMPARE_HELP, no_args_is_help=True)
def compare(
    target: Annotated[
        str, typer.Argument(help="The function that makes model and batch.", metavar="TARGET")
    ],
    budgets: Annotated[
        str,
        typer.Option(
            help="Of autoremat: shares of what eager's step needs above its resident bytes, sizes "
            "of the whole step (12GiB, bytes), or smallest."
        ),
    ] = "75%,50%,25%,smallest",
    variants: Annotated[
        str | None,
        typer.Option(help="What else to measure; see above.", show_default=False),
    ] = None,
    compiler: Annotated[
        Compiler, typer.Option(help="What runs planned graphs and checkpointed models.")
    ] = Compiler.INDUCTOR,
    rounds: Annotated[int, typer.Option(help="Timed steps of each variant.", min=1)] = 7,
    plot: Annotated[
        Path | None,
        typer.Option(help="Write peak against time to this SVG file.", show_default=False),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the plot's file whatever it is.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout in place of the table.")
    ] = False,
    alone: Annotated[
        bool,
        typer.Option(
            "--alone",
            help="Time each variant before the next is built, where the device holds only one.",
        ),
    ] = False,
    time_limit: Annotated[
        float, typer.Option(help="Seconds for the solver, per graph.", min=0.0)
    ] = 30.0,
    timeout: Annotated[float, typer.Option(help="Seconds for one variant to be measured.")] = 900.0,
) -> None:
    """Measure, print, draw: see `commands.compare`."""
    try:
        with leaving_at_once():
            from autoremat.commands.compare import run

        code = run(
            target,
            budgets=budgets,
            variants=variants,
            compiler=compiler,
            rounds=rounds,
            time_limit=time_limit,
            timeout=timeout,
            alone=alone,
            picture=plot,
            force=force,
            as_json=as_json,
        )
    except KeyboardInterrupt:
        typer.echo(SENTENCE, err=True)
        code = INTERRUPTED
    raise typer.Exit(code)
