"""The models of `gpu_benchmarks.py`: real shapes, random weights in bfloat16.

Enters: batch, device and whether tiny stand-ins are wanted, from the environment: a target takes no
arguments, and is called in processes of its own. Leaves: a model that returns its loss, its batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

BATCH, DEVICE, TINY = "GPU_BENCHMARK_BATCH", "GPU_BENCHMARK_DEVICE", "GPU_BENCHMARK_TINY"
UNITS = {"llama_1b": 4096, "gpt2_xl": 1024, "vit_l": 1}
"""Of a sample: the tokens of language models, of others the sample itself."""
TINY_TOKENS = 32

Made = tuple[nn.Module, tuple[Tensor, ...]]


class Loss(nn.Module):
    """A model of transformers that returns its loss alone."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        loss: Tensor = self.model(**{self.name: inputs}, labels=labels).loss
        return loss


def llama_1b() -> Made:
    """The shape of Llama 3.2 1B: 16 layers of width 2,048, eight heads of keys, 4,096 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_or_tiny(128_256, 256),
        hidden_size=_or_tiny(2048, 32),
        intermediate_size=_or_tiny(8192, 64),
        num_hidden_layers=_or_tiny(16, 2),
        num_attention_heads=_or_tiny(32, 4),
        num_key_value_heads=_or_tiny(8, 2),
        max_position_embeddings=_tokens("llama_1b"),
        tie_word_embeddings=True,
        use_cache=False,
    )
    return _language_model(lambda: LlamaForCausalLM(config), config.vocab_size, "llama_1b")


def gpt2_xl() -> Made:
    """GPT-2 XL: 48 layers of width 1,600, 1,024 tokens, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=_or_tiny(50_257, 256),
        n_positions=_tokens("gpt2_xl"),
        n_embd=_or_tiny(1600, 32),
        n_layer=_or_tiny(48, 2),
        n_head=_or_tiny(25, 4),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
        use_cache=False,
    )

    def make() -> nn.Module:
        model = GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"  # else its first loss warns, which breaks the graph
        return model

    return _language_model(make, config.vocab_size, "gpt2_xl")


def vit_l() -> Made:
    """ViT-L/16 at 224 pixels, 1,000 classes."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=_or_tiny(1024, 32),
        num_hidden_layers=_or_tiny(24, 2),
        num_attention_heads=_or_tiny(16, 4),
        intermediate_size=_or_tiny(4096, 64),
        image_size=_or_tiny(224, 32),
        num_labels=_or_tiny(1000, 10),
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    )
    size, classes = config.image_size, config.num_labels

    def batch() -> tuple[Tensor, ...]:
        images = torch.randn(_batch(), 3, size, size, dtype=torch.bfloat16)
        return images, torch.randint(classes, (_batch(),))

    return _made(lambda: ViTForImageClassification(config), "pixel_values", batch)


def _language_model(make: Callable[[], nn.Module], vocabulary: int, name: str) -> Made:
    def batch() -> tuple[Tensor, ...]:
        tokens = torch.randint(vocabulary, (_batch(), _tokens(name)))
        return tokens, tokens

    return _made(make, "input_ids", batch)


def _made(
    make: Callable[[], nn.Module], name: str, batch: Callable[[], tuple[Tensor, ...]]
) -> Made:
    torch.manual_seed(0)
    device = torch.device(os.environ.get(DEVICE, "cuda"))
    inputs = tuple(x.to(device) for x in batch())
    with device:
        model = Loss(make().to(torch.bfloat16), name)
    return model.to(device).train(), inputs


def _is_tiny() -> bool:
    return os.environ.get(TINY) == "1"


def _or_tiny(real: Any, tiny: Any) -> Any:
    return tiny if _is_tiny() else real


def _tokens(name: str) -> int:
    return TINY_TOKENS if _is_tiny() else UNITS[name]


def _batch() -> int:
    return int(os.environ.get(BATCH, "1"))
