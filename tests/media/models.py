"""Small transformers models with random weights, for the small processors."""

import torch

from batchloom.batches import add_image_masks

TEXT_WINDOW = 24
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def make_text_config(processor, **overrides):
    vocabulary = len(processor.tokenizer)
    return {**TEXT, "vocab_size": vocabulary, "pad_token_id": 0, **overrides}


def make_vision_config(**overrides):
    return {
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        **overrides,
    }


def get_token_id(processor, name):
    return processor.tokenizer.convert_tokens_to_ids(name)


def qwen2_vl(processor):
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    config = Qwen2VLConfig(
        text_config=make_text_config(processor, rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2]}),
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        **get_qwen_token_ids(processor),
    )
    return Qwen2VLForConditionalGeneration(config)


def get_qwen_token_ids(processor):
    token_names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {key: get_token_id(processor, name) for key, name in token_names.items()}


def qwen2_5_vl(processor):
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config=make_text_config(processor, rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2]}),
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 32,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        **get_qwen_token_ids(processor),
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl(processor):
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig(
        text_config=make_text_config(
            processor,
            head_dim=8,
            rope_parameters={
                "rope_type": "default",
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        ),
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        **get_qwen_token_ids(processor),
    )
    return Qwen3VLForConditionalGeneration(config)


def llava(processor):
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**make_vision_config(image_size=28, patch_size=14)),
        text_config=LlamaConfig(**make_text_config(processor)),
        image_token_index=get_token_id(processor, "<image>"),
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config)


def llava_next(processor):
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaNextConfig,
        LlavaNextForConditionalGeneration,
    )

    config = LlavaNextConfig(
        vision_config=CLIPVisionConfig(**make_vision_config(image_size=28, patch_size=14)),
        text_config=LlamaConfig(**make_text_config(processor)),
        image_token_index=get_token_id(processor, "<image>"),
        image_grid_pinpoints=processor.image_processor.image_grid_pinpoints,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
    )
    return LlavaNextForConditionalGeneration(config)


def idefics3(processor):
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig

    config = Idefics3Config(
        vision_config=make_vision_config(image_size=56, patch_size=14),
        text_config=LlamaConfig(**make_text_config(processor)),
        image_token_id=get_token_id(processor, "<image>"),
        scale_factor=2,
        pad_token_id=0,
    )
    return Idefics3ForConditionalGeneration(config)


def smolvlm(processor):
    from transformers import LlamaConfig, SmolVLMConfig, SmolVLMForConditionalGeneration

    config = SmolVLMConfig(
        vision_config=make_vision_config(image_size=56, patch_size=14),
        text_config=LlamaConfig(**make_text_config(processor)),
        image_token_id=get_token_id(processor, "<image>"),
        scale_factor=2,
        pad_token_id=0,
    )
    return SmolVLMForConditionalGeneration(config)


def gemma3(processor):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig

    config = Gemma3Config(
        text_config=Gemma3TextConfig(**make_text_config(processor, head_dim=8, sliding_window=TEXT_WINDOW)),
        vision_config=make_vision_config(image_size=56, patch_size=14),
        mm_tokens_per_image=4,
        boi_token_index=get_token_id(processor, "<start_of_image>"),
        eoi_token_index=get_token_id(processor, "<end_of_image>"),
        image_token_index=get_token_id(processor, "<image_soft_token>"),
    )
    return Gemma3ForConditionalGeneration(config)


def qwen2_audio(processor):
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration, Qwen2Config

    config = Qwen2AudioConfig(
        audio_config={
            "d_model": 24,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "num_mel_bins": 80,
            "max_source_positions": processor.feature_extractor.nb_max_frames // 2,
        },
        text_config=Qwen2Config(**make_text_config(processor)),
        audio_token_index=get_token_id(processor, "<|AUDIO|>"),
    )
    return Qwen2AudioForConditionalGeneration(config)


MODELS = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "llava": llava,
    "llava_next": llava_next,
    "idefics3": idefics3,
    "smolvlm": smolvlm,
    "gemma3": gemma3,
    "qwen2_audio": qwen2_audio,
}


def make_model(name, processor):
    torch.manual_seed(7)
    model = MODELS[name](processor)
    for weight in model.parameters():
        # Weights that start as zeros would hide the image features.
        if not weight.any():
            torch.nn.init.normal_(weight, std=0.02)
    return model.eval()


def select_model_inputs(name, batch):
    """Return a batch without labels, with image masks for Gemma 3."""
    if name == "gemma3":
        batch = add_image_masks(batch, TEXT_WINDOW)
    return {key: value for key, value in batch.items() if key != "labels"}
