"""Architectures that read text: decoders, encoders, both, mixtures of experts, recurrent ones.

Enters: nothing. Leaves: them, each once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compatibility_architecture import (
    GPT,
    GROUPED,
    SEQ2SEQ,
    SPECIAL,
    T5,
    TEXT,
    Architecture,
    Config,
)
from compatibility_batches import TOKENS, VOCABULARY


def decoders() -> Iterator[Architecture]:
    """From left to right."""

    def decoder(name: str, model: str, config: Config, **changes: Any) -> Architecture:
        arguments = {**config, **changes}
        loss_type = None if model.endswith("ForCausalLM") else "ForCausalLM"
        return Architecture(name, "decoder", model, arguments, "causal", loss_type)

    gpt_neo = {
        **TEXT,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 16,
    }
    del gpt_neo["num_hidden_layers"], gpt_neo["num_attention_heads"]
    yield decoder("gpt2", "GPT2LMHeadModel", GPT)
    yield decoder("gpt_neo", "GPTNeoForCausalLM", gpt_neo)
    yield decoder("gpt_neox", "GPTNeoXForCausalLM", TEXT)
    yield decoder("gptj", "GPTJForCausalLM", GPT, rotary_dim=4)
    yield decoder("gpt_bigcode", "GPTBigCodeForCausalLM", GPT)
    yield decoder("codegen", "CodeGenForCausalLM", GPT, rotary_dim=4)
    yield decoder("opt", "OPTForCausalLM", TEXT, ffn_dim=64, word_embed_proj_dim=32)
    yield decoder("bloom", "BloomForCausalLM", TEXT, n_layer=2, n_head=4)
    yield decoder("llama", "LlamaForCausalLM", GROUPED)
    yield decoder("mistral", "MistralForCausalLM", GROUPED, sliding_window=16)
    yield decoder("qwen2", "Qwen2ForCausalLM", GROUPED)
    yield decoder("qwen3", "Qwen3ForCausalLM", GROUPED, head_dim=8)
    yield decoder("gemma", "GemmaForCausalLM", GROUPED, head_dim=8)
    yield decoder("gemma2", "Gemma2ForCausalLM", GROUPED, head_dim=8, sliding_window=16)
    yield decoder("gemma3", "Gemma3ForCausalLM", GROUPED, head_dim=8, sliding_window=16)
    yield decoder("phi", "PhiForCausalLM", TEXT)
    yield decoder("phi3", "Phi3ForCausalLM", GROUPED)
    yield decoder("falcon", "FalconForCausalLM", TEXT)
    yield decoder(
        "mpt",
        "MptForCausalLM",
        {**SPECIAL, "vocab_size": VOCABULARY},
        d_model=32,
        n_heads=4,
        n_layers=2,
        expansion_ratio=2,
        max_seq_len=2 * TOKENS,
    )
    yield decoder("stablelm", "StableLmForCausalLM", GROUPED)
    yield decoder("starcoder2", "Starcoder2ForCausalLM", GROUPED)
    yield decoder("cohere", "CohereForCausalLM", GROUPED)
    yield decoder("olmo2", "Olmo2ForCausalLM", GROUPED)
    yield decoder("granite", "GraniteForCausalLM", GROUPED)
    yield decoder("glm", "GlmForCausalLM", GROUPED, head_dim=8)
    yield decoder("smollm3", "SmolLM3ForCausalLM", GROUPED, no_rope_layer_interval=2)
    yield decoder("olmo3", "Olmo3ForCausalLM", GROUPED, sliding_window=16)
    yield decoder("glm4", "Glm4ForCausalLM", GROUPED, head_dim=8)
    yield decoder("ministral3", "Ministral3ForCausalLM", GROUPED, head_dim=8)
    yield decoder("diffllama", "DiffLlamaForCausalLM", GROUPED)
    yield decoder(
        "gemma3n",
        "Gemma3nForCausalLM",
        GROUPED,
        head_dim=8,
        sliding_window=16,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        laurel_rank=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0],
    )
    yield decoder(
        "gemma4",
        "Gemma4ForCausalLM",
        GROUPED,
        head_dim=8,
        global_head_dim=16,
        sliding_window=16,
        num_hidden_layers=3,
        num_kv_shared_layers=1,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    )
    yield decoder(
        "minicpm3",
        "MiniCPM3ForCausalLM",
        TEXT,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    yield decoder("doge", "DogeForCausalLM", GROUPED)
    yield decoder(
        "xglm",
        "XGLMForCausalLM",
        SPECIAL,
        vocab_size=VOCABULARY,
        d_model=32,
        ffn_dim=64,
        num_layers=2,
        attention_heads=4,
    )


def encoders() -> Iterator[Architecture]:
    """In both directions."""

    def encoder(name: str, model: str, config: Config = TEXT, **changes: Any) -> Architecture:
        arguments = {key: value for key, value in config.items() if key != "use_cache"} | changes
        inputs = changes.pop("inputs", "masked")
        arguments.pop("inputs", None)
        return Architecture(name, "encoder", model, arguments, inputs)

    distilbert = {**SPECIAL, "vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 64}
    distilbert |= {"n_layers": 2, "n_heads": 4, "max_position_embeddings": 2 * TOKENS}
    funnel = {**SPECIAL, "vocab_size": VOCABULARY, "d_model": 32, "d_inner": 64, "d_head": 8}
    funnel |= {"n_head": 4, "block_sizes": [1, 1], "num_decoder_layers": 1}
    xlnet = {**SPECIAL, "vocab_size": VOCABULARY, "d_model": 32, "d_inner": 64}
    xlnet |= {"n_layer": 2, "n_head": 4}
    reformer = {**SPECIAL, "vocab_size": VOCABULARY, "hidden_size": 32, "feed_forward_size": 64}
    reformer |= {"num_attention_heads": 4, "attention_head_size": 8, "num_buckets": 4}
    reformer |= {"attn_layers": ["local", "lsh"], "axial_pos_shape": (8, 8)}
    reformer |= {"local_attn_chunk_length": 16, "lsh_attn_chunk_length": 16}
    perceiver = {**SPECIAL, "vocab_size": VOCABULARY, "d_model": 32, "d_latents": 32}
    perceiver |= {"num_latents": 32, "num_self_attends_per_block": 2, "qk_channels": 32}
    perceiver |= {"num_self_attention_heads": 4, "num_cross_attention_heads": 4}
    perceiver |= {"v_channels": 32, "max_position_embeddings": TOKENS}
    yield encoder("bert", "BertForMaskedLM")
    yield encoder("roberta", "RobertaForMaskedLM")
    yield encoder("camembert", "CamembertForMaskedLM")
    yield encoder("xlm_roberta", "XLMRobertaForMaskedLM")
    yield encoder("distilbert", "DistilBertForMaskedLM", distilbert)
    yield encoder("electra", "ElectraForMaskedLM", embedding_size=16)
    yield encoder("albert", "AlbertForMaskedLM", embedding_size=16)
    yield encoder(
        "deberta_v2", "DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"]
    )
    yield encoder("modernbert", "ModernBertForMaskedLM", local_attention=16)
    yield encoder("mpnet", "MPNetForMaskedLM")
    yield encoder("convbert", "ConvBertForMaskedLM", embedding_size=16)
    yield encoder("longformer", "LongformerForMaskedLM", attention_window=16)
    yield encoder(
        "big_bird",
        "BigBirdForMaskedLM",
        block_size=4,
        num_random_blocks=1,
        attention_type="block_sparse",
    )
    yield encoder("deberta", "DebertaForMaskedLM", relative_attention=True)
    yield encoder("esm", "EsmForMaskedLM", position_embedding_type="rotary")
    yield encoder("fnet", "FNetForMaskedLM", inputs="unmasked")
    yield encoder("funnel", "FunnelForMaskedLM", funnel)
    yield encoder("xlnet", "XLNetLMHeadModel", xlnet)
    yield encoder(
        "reformer", "ReformerForMaskedLM", reformer, hash_seed=0, axial_pos_embds_dim=(16, 16)
    )
    yield encoder("perceiver", "PerceiverForMaskedLM", perceiver)
    yield encoder("layoutlm", "LayoutLMForMaskedLM", max_2d_position_embeddings=128, inputs="boxes")


def encoder_decoders() -> Iterator[Architecture]:
    """A source text, then a target text."""

    def both(name: str, model: str, config: Config = SEQ2SEQ, **changes: Any) -> Architecture:
        return Architecture(name, "encoder-decoder", model, {**config, **changes}, "translation")

    yield both("t5", "T5ForConditionalGeneration", T5)
    yield both(
        "longt5",
        "LongT5ForConditionalGeneration",
        T5,
        local_radius=15,
        encoder_attention_type="local",
    )
    yield both(
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        T5,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_experts=4,
        expert_capacity=32,
    )
    yield both("bart", "BartForConditionalGeneration")
    yield both("pegasus", "PegasusForConditionalGeneration")
    yield both("mbart", "MBartForConditionalGeneration")
    yield both("marian", "MarianMTModel")
    yield both(
        "m2m_100", "M2M100ForConditionalGeneration", encoder_layerdrop=0.0, decoder_layerdrop=0.0
    )
    yield both("blenderbot", "BlenderbotForConditionalGeneration")


def mixtures() -> Iterator[Architecture]:
    """Each token to a few of many experts."""

    def mixture(name: str, model: str, **config: Any) -> Architecture:
        return Architecture(name, "MoE", model, {**GROUPED, **config}, "causal")

    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    yield mixture("mixtral", "MixtralForCausalLM", num_local_experts=4, output_router_logits=True)
    yield mixture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        **experts,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    yield mixture(
        "qwen3_moe", "Qwen3MoeForCausalLM", **experts, moe_intermediate_size=32, head_dim=8
    )
    yield mixture("olmoe", "OlmoeForCausalLM", **experts)
    yield mixture("granitemoe", "GraniteMoeForCausalLM", num_local_experts=4, num_experts_per_tok=2)
    yield mixture(
        "gpt_oss",
        "GptOssForCausalLM",
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
        sliding_window=16,
    )
    yield mixture(
        "llama4_text",
        "Llama4ForCausalLM",
        intermediate_size_mlp=64,
        num_local_experts=4,
        head_dim=8,
        interleave_moe_layer_step=2,
        no_rope_layer_interval=2,
        attention_chunk_size=16,
    )
    yield mixture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    )
    yield mixture(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=32,
        moe_layer_start_index=1,
    )
    yield mixture(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    )


def recurrent() -> Iterator[Architecture]:
    """A state from token to token, alone or beside attention."""
    mamba2 = {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
        "num_key_value_heads": 2,
    }
    linear = {
        "head_dim": 8,
        "num_key_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    }

    def recurrent(name: str, model: str, **config: Any) -> Architecture:
        return Architecture(name, "state space", model, {**TEXT, **config}, "causal")

    yield recurrent("mamba", "MambaForCausalLM", state_size=8)
    yield recurrent(
        "mamba2",
        "Mamba2ForCausalLM",
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=16,
    )
    yield recurrent("falcon_mamba", "FalconMambaForCausalLM", state_size=8)
    yield recurrent(
        "recurrent_gemma",
        "RecurrentGemmaForCausalLM",
        lru_width=32,
        num_hidden_layers=3,
        attention_window_size=16,
        num_key_value_heads=1,
    )
    yield recurrent("bamba", "BambaForCausalLM", **mamba2, attn_layer_indices=[1])
    yield recurrent("falcon_h1", "FalconH1ForCausalLM", **mamba2, mamba_d_ssm=64)
    yield recurrent(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        **mamba2,
        layer_types=["mamba", "attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
    )
    yield recurrent(
        "zamba2",
        "Zamba2ForCausalLM",
        layers_block_type=["mamba", "hybrid", "mamba"],
        num_hidden_layers=3,
        n_mamba_heads=8,
        mamba_ngroups=2,
        mamba_d_state=8,
        chunk_size=16,
        use_mamba_kernels=False,
    )
    yield recurrent(
        "jamba",
        "JambaForCausalLM",
        num_key_value_heads=2,
        num_experts=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
        use_mamba_kernels=False,
    )
    yield recurrent(
        "nemotron_h",
        "NemotronHForCausalLM",
        layers_block_type=["mamba", "attention", "moe"],
        head_dim=8,
        num_key_value_heads=2,
        ssm_state_size=8,
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=4,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    )
    yield recurrent(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        **linear,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    yield recurrent("qwen3_5_text", "Qwen3_5ForCausalLM", **linear)
    yield recurrent(
        "lfm2",
        "Lfm2ForCausalLM",
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
    )
    yield recurrent(
        "minimax",
        "MiniMaxForCausalLM",
        num_key_value_heads=2,
        layer_types=["linear_attention", "full_attention"],
        block_size=16,
        num_local_experts=4,
    )
    yield recurrent("rwkv", "RwkvForCausalLM", context_length=2 * TOKENS)
    yield recurrent(
        "xlstm",
        "xLSTMForCausalLM",
        num_heads=4,
        chunk_size=16,
        mode="train",
        ffn_round_up_to_multiple_of=8,
        autocast_kernel_dtype="float32",
    )
