"""The table of a trial.

Enters: a card and a `Trial`. Leaves: what rich prints; nothing is printed.
"""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoremat.cost.card import Card
from autoremat.trial.model import Row, Trial
from autoremat.units import format_nbytes, format_us


def trial_table(card: Card, trial: Trial) -> RenderableType:
    """What the device reaches; then each budget, predicted beside measured."""
    table = Table(box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    table.add_column("Budget", no_wrap=True)
    for heading in ("", "Peak", "off", "Reserved", "off", "Step", "off"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in trial.rows:
        style = "bold red" if row.is_over else ""
        table.add_row(row.name, *_cells(row), style=style)
    notes = [Text(f"{row.name}: {_note(row)}") for row in trial.rows if _note(row)]
    return Group(Text(_ceilings(card)), Text(_title(trial)), table, *notes, Text(_CAPTION))


_CAPTION = (
    'Peak, reserved memory and step are measured; "off" is how far from that a prediction was. The '
    "peak is all that is allocated, workspaces of libraries included."
)


def _title(trial: Trial) -> str:
    return (
        f"A GPT of {trial.layers} layers, width {trial.width}, {trial.batch} sequences of "
        f"{trial.tokens} tokens, bfloat16 autocast, {trial.compiler}"
    )


def _ceilings(card: Card) -> str:
    products = ", ".join(
        f"{gflops / 1e3:.3g} TFLOP/s in {name}"
        for name, gflops in (
            ("bfloat16", card.bfloat16_gflops),
            ("float16", card.float16_gflops),
            ("float32", card.float32_gflops),
        )
    )
    return (
        f"{card.name}: copies {card.copy_gbps:.4g} GB/s, large products {products}, the smallest "
        f"operator {format_us(card.launch_us)}"
    )


def _cells(row: Row) -> list[str]:
    reserved = row.reserved_nbytes, row.predicted_reserved_nbytes
    return [
        _bytes(row.budget_nbytes),
        *(_bytes(row.peak_nbytes), _off(row.peak_nbytes, row.predicted_peak_nbytes)),
        *(_bytes(row.reserved_nbytes), _off(*reserved)),
        *(
            "" if row.step_us is None else format_us(row.step_us),
            _off(row.step_us, row.predicted_us),
        ),
    ]


def _bytes(nbytes: int | None) -> str:
    return "" if nbytes is None else format_nbytes(nbytes)


def _off(measured: float | None, predicted: float | None) -> str:
    return f"{100 * (predicted / measured - 1):+.1f} %" if measured and predicted else ""


def _note(row: Row) -> str:
    if row.is_over:
        return f"its measured peak is above the budget. {row.message}".strip()
    return row.message if row.status == "ok" else f"{row.status}: {row.message}"
