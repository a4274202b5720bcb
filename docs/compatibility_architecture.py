"""What an architecture of the zoo is, and the configurations that many of them share.

Enters: nothing. Leaves: `Architecture`, which builds a model and its batch, and configurations as
keyword arguments. Widths of 32 against 64 tokens make activations dominate what a step holds, as
they do at real sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from compatibility_batches import CLASSES, IMAGE, TOKENS, VOCABULARY, Batch
from torch import Tensor, nn

Config = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """How to build one architecture.

    Attributes:
        name: as transformers calls the model type.
        kind: one of `compatibility_zoo.KINDS`.
        model: the class in transformers.
        config: arguments of its configuration class.
        inputs: a method of `Batch`.
        loss_type: transformers' name of the loss, where it would guess it with a warning.
        target: the output whose mean squared distance from 1 is the loss, where the model has none.
    """

    name: str
    kind: str
    model: str
    config: Config
    inputs: str
    loss_type: str | None = None
    target: str | None = None

    def build(self) -> tuple[nn.Module, dict[str, Any]]:
        """The model in train mode, and one batch."""
        import transformers

        torch.manual_seed(0)
        model_class = getattr(transformers, self.model)
        config = model_class.config_class(**self.config)
        model = model_class(config).train()
        if self.loss_type is not None:
            model.loss_type = self.loss_type
        batch: dict[str, Any] = getattr(Batch(), self.inputs)()
        return model, batch

    def loss(self, output: Any) -> Tensor:
        """The loss of what the model returns."""
        loss: Tensor = (
            output.loss if self.target is None else (output[self.target] - 1).square().mean()
        )
        return loss


SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False}
# The names that most text models use, then those of GPT-2, OPT and BART.
TEXT: Config = {
    **SPECIAL,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2 * TOKENS,
}
GROUPED: Config = {**TEXT, "num_key_value_heads": 2}
GPT: Config = {
    **SPECIAL,
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 2 * TOKENS,
}
SEQ2SEQ: Config = {
    **SPECIAL,
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 2 * TOKENS,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
T5: Config = {
    **SPECIAL,
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
PATCHES: Config = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": IMAGE,
    "patch_size": 4,
}
IMAGES: Config = {**PATCHES, "num_labels": CLASSES}
# Masking and layer drop choose by numpy and by Python, which no compiled step can repeat.
SOUND: Config = {
    **TEXT,
    "num_labels": CLASSES,
    "conv_dim": (32, 32, 32),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (10, 4, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    "classifier_proj_size": 32,
}
