"""The options that say how a training run is set up, as typer sees them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

import typer

from autoremat.setup.asked import TrainingSetup

Precision = Annotated[
    str | None,
    typer.Option(
        help="Parameters in bf16, fp16 or fp32; or autocast: in fp32, the forward under autocast "
        "to bfloat16. The model's own without it.",
        show_default=False,
    ),
]
Accumulate = Annotated[
    int, typer.Option(help="Micro-batches of one optimizer step: gradients stay between them.")
]
Lora = Annotated[
    str,
    typer.Option(
        help="Linear layers that get low-rank adapters, all else frozen: q_proj,v_proj, or "
        "patterns of paths, or all-linear.",
        show_default=False,
    ),
]
LoraRank = Annotated[int, typer.Option(help="Rank of the adapters.")]
Freeze = Annotated[
    str,
    typer.Option(
        help="Modules or parameters that are not trained, likewise: embed_tokens,*.layers.0.*",
        show_default=False,
    ),
]
Attention = Annotated[
    str | None,
    typer.Option(
        help="sdpa or eager, for models of transformers; the model's own without it.",
        show_default=False,
    ),
]
Shards = Annotated[
    int,
    typer.Option(
        help="GPUs among which parameters, gradients and optimizer state are divided (FSDP2)."
    ),
]
LossChunks = Annotated[
    int,
    typer.Option(
        help="Parts in which a causal language model of transformers computes its loss: its "
        "logits are never whole."
    ),
]
NoCode = Annotated[
    bool,
    typer.Option(
        "--no-code",
        help="For a GPU that is not here: generate and read no code. Faster, and the peak is that "
        "of a model of the code.",
    ),
]


def setup_given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Of all options of a command, those of a setup: they have its fields' names."""
    return {field.name: options[field.name] for field in fields(TrainingSetup)}
