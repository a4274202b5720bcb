"""The model of most tests of trainers: a Llama of transformers with four narrow layers."""

from __future__ import annotations

from torch import nn

VOCABULARY = 64


def llama() -> nn.Module:
    """Its loss is in the model; its weights are random, by whatever seed there is."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCABULARY}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.LlamaConfig(**sizes, **heads, **ids, use_cache=False)
    return transformers.LlamaForCausalLM(config)
