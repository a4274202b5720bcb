"""Architectures of Hugging Face transformers, tiny and with random weights.

Enters: nothing. Leaves: `ZOO`, by name: what builds a model in train mode and one batch of keyword
inputs, the same each time, whose loss the model computes where it offers one. Nothing is
downloaded.
"""

from __future__ import annotations

import compatibility_senses as senses
import compatibility_text as text
from compatibility_architecture import Architecture

KINDS = {
    "decoder": "decoders",
    "encoder": "encoders",
    "encoder-decoder": "encoder-decoders",
    "vision": "vision",
    "audio": "audio",
    "MoE": "mixtures of experts",
    "state space": "state space and recurrent",
    "multimodal": "multimodal",
    "series": "time series",
}

# What was held against plain `torch.compile` without autoremat, and is found there too.
UPSTREAM = {
    "big_bird": "numpy chooses blocks, which Dynamo traces into other draws: gradients differ from "
    "eager's by 1.7e-2 with backend `eager`, by 7.6e-4 with `aot_eager`.",
    "reformer": "Each call draws a new seed of its hashes from the system: two eager steps differ "
    "by 7.7e-1.",
}

ZOO: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        *text.decoders(),
        *text.encoders(),
        *text.encoder_decoders(),
        *senses.vision(),
        *senses.audio(),
        *text.mixtures(),
        *text.recurrent(),
        *senses.multimodal(),
        *senses.series(),
    )
}
