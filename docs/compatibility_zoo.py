"""Architectures of Hugging Face transformers, tiny and with random weights.

Enters: a name of `ZOO`. Leaves: a model in train mode and one batch of keyword inputs, the same
each time, whose loss the model computes where it offers one. Nothing is downloaded. Widths of 32
against 64 tokens make activations dominate what a step holds, as they do at real sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from compatibility_batches import CLASSES, IMAGE, MELS, TOKENS, VOCABULARY, Batch
from torch import nn

KINDS = {
    "decoder": "decoders",
    "encoder": "encoders",
    "encoder-decoder": "encoder-decoders",
    "vision": "vision",
    "audio": "audio",
    "MoE": "mixtures of experts",
    "state space": "state space and recurrent",
    "multimodal": "multimodal",
}

Config = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """How to build one architecture.

    Attributes:
        name: as transformers calls the model type.
        kind: one of `KINDS`.
        model: the class in transformers.
        config: arguments of its configuration class.
        inputs: a method of `Batch`.
        loss_type: transformers' name of the loss, where it would guess it with a warning.
    """

    name: str
    kind: str
    model: str
    config: Config
    inputs: str
    loss_type: str | None = None

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


def _decoders() -> Iterator[Architecture]:
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


def _encoders() -> Iterator[Architecture]:
    def encoder(name: str, model: str, config: Config = TEXT, **changes: Any) -> Architecture:
        arguments = {key: value for key, value in config.items() if key != "use_cache"} | changes
        inputs = changes.pop("inputs", "masked")
        arguments.pop("inputs", None)
        return Architecture(name, "encoder", model, arguments, inputs)

    distilbert = {**SPECIAL, "vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 64}
    distilbert |= {"n_layers": 2, "n_heads": 4, "max_position_embeddings": 2 * TOKENS}
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
    yield encoder("layoutlm", "LayoutLMForMaskedLM", max_2d_position_embeddings=128, inputs="boxes")


def _encoder_decoders() -> Iterator[Architecture]:
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
    yield both("bart", "BartForConditionalGeneration")
    yield both("pegasus", "PegasusForConditionalGeneration")
    yield both("mbart", "MBartForConditionalGeneration")
    yield both("marian", "MarianMTModel")
    yield both(
        "m2m_100", "M2M100ForConditionalGeneration", encoder_layerdrop=0.0, decoder_layerdrop=0.0
    )
    yield both("blenderbot", "BlenderbotForConditionalGeneration")


def _vision() -> Iterator[Architecture]:
    def vision(name: str, model: str, inputs: str = "images", **config: Any) -> Architecture:
        return Architecture(name, "vision", model, config, inputs)

    stages = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4]}
    widths = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": CLASSES}
    segformer = {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "sr_ratios": [2, 1],
        "hidden_sizes": [16, 32],
        "patch_sizes": [3, 3],
        "strides": [2, 2],
        "num_attention_heads": [2, 4],
        "mlp_ratios": [2, 2],
        "decoder_hidden_size": 32,
    }
    yield vision("vit", "ViTForImageClassification", **IMAGES)
    yield vision("deit", "DeiTForImageClassification", **IMAGES)
    yield vision("beit", "BeitForImageClassification", **IMAGES)
    yield vision("dinov2", "Dinov2ForImageClassification", **IMAGES)
    yield vision(
        "swin",
        "SwinForImageClassification",
        image_size=IMAGE,
        patch_size=2,
        window_size=4,
        num_labels=CLASSES,
        **stages,
    )
    yield vision("convnext", "ConvNextForImageClassification", num_stages=2, **widths)
    yield vision("resnet", "ResNetForImageClassification", embedding_size=16, **widths)
    yield vision(
        "regnet", "RegNetForImageClassification", embedding_size=16, groups_width=8, **widths
    )
    yield vision(
        "segformer", "SegformerForSemanticSegmentation", "segments", num_labels=CLASSES, **segformer
    )
    yield vision(
        "videomae",
        "VideoMAEForVideoClassification",
        "video",
        num_frames=4,
        **{**IMAGES, "patch_size": 8},
    )


def _audio() -> Iterator[Architecture]:
    def audio(name: str, model: str, inputs: str, **config: Any) -> Architecture:
        return Architecture(name, "audio", model, config, inputs)

    yield audio("wav2vec2", "Wav2Vec2ForCTC", "speech", **SOUND)
    yield audio("hubert", "HubertForSequenceClassification", "waves", **SOUND)
    yield audio("wavlm", "WavLMForSequenceClassification", "waves", **SOUND)
    yield audio(
        "audio_spectrogram_transformer",
        "ASTForAudioClassification",
        "spectrogram",
        **{**IMAGES, "max_length": TOKENS, "num_mel_bins": MELS},
    )
    yield audio(
        "whisper",
        "WhisperForConditionalGeneration",
        "mels",
        **SEQ2SEQ,
        num_mel_bins=MELS,
        max_source_positions=TOKENS,
        max_target_positions=TOKENS,
    )


def _mixtures() -> Iterator[Architecture]:
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


def _recurrent() -> Iterator[Architecture]:
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


def _multimodal() -> Iterator[Architecture]:
    def multimodal(name: str, model: str, inputs: str, **config: Any) -> Architecture:
        return Architecture(name, "multimodal", model, config, inputs)

    vision = {**PATCHES, "patch_size": 8}
    towers = {"text_config": TEXT, "vision_config": vision}
    yield multimodal("clip", "CLIPModel", "captions", **towers, projection_dim=16)
    yield multimodal("siglip", "SiglipModel", "captions", **towers)
    yield multimodal(
        "blip",
        "BlipForConditionalGeneration",
        "captioning",
        text_config={**TEXT, "encoder_hidden_size": 32, "is_decoder": True},
        vision_config=vision,
        projection_dim=16,
    )
    yield multimodal(
        "vilt", "ViltForQuestionAnswering", "questions", **{**TEXT, **vision}, num_labels=CLASSES
    )
    yield multimodal(
        "llava",
        "LlavaForConditionalGeneration",
        "image_in_text",
        text_config={**GROUPED, "model_type": "llama"},
        vision_config={**vision, "model_type": "clip_vision_model"},
        image_token_index=VOCABULARY - 1,
        vision_feature_layer=-1,
    )


def _zoo() -> Iterator[Architecture]:
    yield from _decoders()
    yield from _encoders()
    yield from _encoder_decoders()
    yield from _vision()
    yield from _audio()
    yield from _mixtures()
    yield from _recurrent()
    yield from _multimodal()


ZOO: dict[str, Architecture] = {architecture.name: architecture for architecture in _zoo()}
