"""Architectures that read images, video, sound or series, alone or with text.

Enters: nothing. Leaves: them, each once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compatibility_architecture import (
    GROUPED,
    IMAGES,
    PATCHES,
    SEQ2SEQ,
    SOUND,
    SPECIAL,
    TEXT,
    Architecture,
)
from compatibility_batches import CLASSES, IMAGE, MELS, TOKENS, VOCABULARY


def vision() -> Iterator[Architecture]:
    """Images and video."""

    def vision(
        name: str, model: str, inputs: str = "images", target: str | None = None, **config: Any
    ) -> Architecture:
        return Architecture(name, "vision", model, config, inputs, target=target)

    stages = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4]}
    widths = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": CLASSES}
    dinov2 = {
        **PATCHES,
        "model_type": "dinov2",
        "out_indices": [1, 2],
        "reshape_hidden_states": False,
    }
    resnet = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}
    resnet |= {"layer_type": "basic", "out_indices": [1, 2]}
    swin = {**stages, "depths": [1] * 4, "num_heads": [2] * 4, "image_size": IMAGE}
    swin |= {"patch_size": 2, "window_size": 4, "embed_dim": 16, "out_indices": [1, 2, 3, 4]}
    detector = {
        "backbone_config": {**resnet, "model_type": "resnet"},
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "num_queries": 8,
        "num_labels": CLASSES,
    }
    sam_decoder = {"hidden_size": 32, "mlp_dim": 64, "num_attention_heads": 4}
    sam_decoder |= {"iou_head_hidden_dim": 32}
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
    yield vision("dinov3_vit", "DINOv3ViTModel", target="last_hidden_state", **PATCHES)
    yield vision("convnextv2", "ConvNextV2ForImageClassification", num_stages=2, **widths)
    yield vision(
        "swinv2",
        "Swinv2ForImageClassification",
        image_size=IMAGE,
        patch_size=2,
        window_size=4,
        num_labels=CLASSES,
        drop_path_rate=0.1,
        **stages,
    )
    yield vision(
        "hiera",
        "HieraForImageClassification",
        image_size=[IMAGE, IMAGE],
        masked_unit_size=[4, 4],
        num_query_pool=1,
        masked_unit_attention=[True, False],
        num_labels=CLASSES,
        **stages,
    )
    yield vision(
        "vit_mae",
        "ViTMAEForPreTraining",
        "unlabelled_images",
        decoder_hidden_size=32,
        decoder_intermediate_size=64,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4,
        **PATCHES,
    )
    yield vision(
        "depth_anything",
        "DepthAnythingForDepthEstimation",
        "unlabelled_images",
        "predicted_depth",
        backbone_config=dinov2,
        patch_size=4,
        reassemble_hidden_size=32,
        reassemble_factors=[1, 0.5],
        neck_hidden_sizes=[16, 32],
        fusion_hidden_size=16,
        head_hidden_size=8,
    )
    yield vision(
        "vjepa2",
        "VJEPA2ForVideoClassification",
        "frames",
        crop_size=IMAGE,
        patch_size=8,
        frames_per_clip=4,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_pooler_layers=1,
        pred_hidden_size=32,
        pred_num_hidden_layers=1,
        pred_num_attention_heads=4,
        num_labels=CLASSES,
    )
    yield vision("detr", "DetrForObjectDetection", "objects", **detector)
    yield vision(
        "deformable_detr",
        "DeformableDetrForObjectDetection",
        "objects",
        **detector,
        num_feature_levels=2,
        with_box_refine=True,
    )
    yield vision(
        "rt_detr",
        "RTDetrForObjectDetection",
        "objects",
        backbone_config={**resnet, "model_type": "rt_detr_resnet"},
        encoder_hidden_dim=32,
        encoder_in_channels=[16, 32],
        feat_strides=[4, 8],
        encoder_ffn_dim=64,
        encoder_attention_heads=4,
        encode_proj_layers=[1],
        d_model=32,
        decoder_in_channels=[32, 32],
        num_feature_levels=2,
        num_queries=8,
        decoder_layers=2,
        decoder_ffn_dim=64,
        decoder_attention_heads=4,
        num_denoising=4,
        num_labels=CLASSES,
    )
    yield vision(
        "mask2former",
        "Mask2FormerForUniversalSegmentation",
        "masks",
        backbone_config={**swin, "model_type": "swin"},
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=64,
        dim_feedforward=64,
        encoder_layers=2,
        decoder_layers=3,
        num_attention_heads=4,
        num_queries=8,
        train_num_points=64,
        num_labels=CLASSES,
    )
    yield vision(
        "sam",
        "SamModel",
        "points",
        "pred_masks",
        vision_config={**PATCHES, "output_channels": 32, "window_size": 4, "num_pos_feats": 16}
        | {"global_attn_indexes": [1], "mlp_dim": 64},
        prompt_encoder_config={"hidden_size": 32, "image_size": IMAGE, "patch_size": 4},
        mask_decoder_config=sam_decoder,
    )
    yield vision(
        "sam2",
        "Sam2Model",
        "points",
        "pred_masks",
        vision_config={
            "backbone_config": {
                "model_type": "sam2_hiera_det_model",
                "hidden_size": 16,
                "image_size": [IMAGE, IMAGE],
                "patch_kernel_size": [3, 3],
                "patch_stride": [2, 2],
                "patch_padding": [1, 1],
                "window_positional_embedding_background_size": [4, 4],
                "blocks_per_stage": [1, 1, 2],
                "embed_dim_per_stage": [16, 32, 64],
                "num_attention_heads_per_stage": [1, 2, 4],
                "window_size_per_stage": [4, 4, 4],
                "num_query_pool_stages": 2,
                "global_attention_blocks": [3],
            },
            "backbone_channel_list": [64, 32, 16],
            "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
            "fpn_hidden_size": 32,
            "fpn_top_down_levels": [1, 2],
        },
        prompt_encoder_config={"hidden_size": 32, "image_size": IMAGE, "patch_size": 8},
        mask_decoder_config=sam_decoder,
    )
    yield vision(
        "videomae",
        "VideoMAEForVideoClassification",
        "video",
        num_frames=4,
        **{**IMAGES, "patch_size": 8},
    )


def audio() -> Iterator[Architecture]:
    """Sound, as waves and as spectrograms."""

    def audio(
        name: str, model: str, inputs: str, target: str | None = None, **config: Any
    ) -> Architecture:
        return Architecture(name, "audio", model, config, inputs, target=target)

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

    yield audio(
        "wav2vec2_bert",
        "Wav2Vec2BertForCTC",
        "filter_banks",
        **{**TEXT, "feature_projection_input_dim": MELS, "layerdrop": 0.0},
        apply_spec_augment=False,
        conv_depthwise_kernel_size=7,
        max_source_positions=2 * TOKENS,
    )
    yield audio(
        "moonshine",
        "MoonshineForConditionalGeneration",
        "dictation",
        **SPECIAL,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        decoder_start_token_id=1,
    )
    yield audio(
        "encodec",
        "EncodecModel",
        "recording",
        "audio_values",
        num_filters=8,
        hidden_size=32,
        upsampling_ratios=[4, 4],
        codebook_size=16,
        num_lstm_layers=1,
    )


def multimodal() -> Iterator[Architecture]:
    """Images and text together."""

    def multimodal(name: str, model: str, inputs: str, **config: Any) -> Architecture:
        return Architecture(name, "multimodal", model, config, inputs)

    vision = {**PATCHES, "patch_size": 8}
    towers = {"text_config": TEXT, "vision_config": vision}
    sections = {**GROUPED, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    sections["rope_parameters"] |= {"rope_theta": 10000.0}
    towers_of_qwen = {"depth": 2, "num_heads": 4, "patch_size": 8, "temporal_patch_size": 2}
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
    yield multimodal(
        "siglip2",
        "Siglip2Model",
        "packed_captions",
        text_config=TEXT,
        vision_config={**PATCHES, "num_patches": 16, "patch_size": 8},
    )
    yield multimodal(
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        "typed_image_in_text",
        text_config={**GROUPED, "model_type": "gemma", "head_dim": 8},
        vision_config={**vision, "model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_index=VOCABULARY - 1,
        projection_dim=32,
    )
    yield multimodal(
        "smolvlm",
        "SmolVLMForConditionalGeneration",
        "images_in_text",
        text_config={**GROUPED, "model_type": "llama"},
        vision_config=vision,
        image_token_id=VOCABULARY - 1,
        scale_factor=2,
    )
    yield multimodal(
        "blip_2",
        "Blip2ForConditionalGeneration",
        "image_in_text",
        text_config={**TEXT, "model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32},
        vision_config=vision,
        qformer_config={**TEXT, "encoder_hidden_size": 32},
        num_query_tokens=16,
        image_token_index=VOCABULARY - 1,
    )
    yield multimodal(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        "packed_image_in_text",
        text_config=sections,
        vision_config={"embed_dim": 32, "hidden_size": 32, **towers_of_qwen, "mlp_ratio": 2},
        image_token_id=VOCABULARY - 1,
    )
    yield multimodal(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        "packed_image_in_text",
        text_config=sections,
        vision_config={
            "hidden_size": 32,
            "out_hidden_size": 32,
            "intermediate_size": 64,
            "window_size": 32,
            "fullatt_block_indexes": [1],
            **towers_of_qwen,
        },
        image_token_id=VOCABULARY - 1,
    )


def series() -> Iterator[Architecture]:
    """Numbers over time."""
    yield Architecture(
        "patchtst",
        "series",
        "PatchTSTForPrediction",
        {
            "num_input_channels": 2,
            "context_length": 64,
            "patch_length": 8,
            "patch_stride": 8,
            "prediction_length": 16,
            "d_model": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
        },
        "series",
    )
    yield Architecture(
        "timesfm",
        "series",
        "TimesFmModelForPrediction",
        {
            "patch_length": 8,
            "context_length": 64,
            "horizon_length": 16,
            "hidden_size": 32,
            "intermediate_size": 64,
            "head_dim": 8,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
        },
        "histories",
    )
