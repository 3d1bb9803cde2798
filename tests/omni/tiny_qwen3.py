"""A Qwen3-Omni of 300,000 parameters, with the real classes and random weights."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
    WhisperFeatureExtractor,
)

from headstart.models.demo import write_byte_tokenizer
from headstart.models.transformers_tools import silence_transformers
from tests.tiny_models import write_once

TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|audio_pad|>", "<|image_pad|>")
TOKENS += ("<|video_pad|>", "<|audio_start|>", "<|audio_end|>", "<|vision_start|>")
TOKENS += ("<|vision_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")
TOKENS += ("<|system|>", "<|user|>", "<|assistant|>")
IDS = {text: 256 + at for at, text in enumerate(TOKENS)}
CODEBOOK, QUANTIZERS = 32, 4
CODES = CODEBOOK + 1024  # of the last 1,024 ids, only the end may be spoken
END = CODEBOOK + 3
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|><|{{ message['role'] }}|>\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|><|assistant|>\n{% endif %}"
)


def _text(width: int, vocabulary: int, layers: int) -> dict[str, Any]:
    half = width // 8
    third = half // 3
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [half - 2 * third, third, third],
        },
    }


def _thinker() -> dict[str, Any]:
    return {
        "audio_config": {
            "d_model": 32,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "num_mel_bins": 16,
            "output_dim": 48,
            "max_source_positions": 100,
            "downsample_hidden_size": 8,
        },
        "vision_config": {
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 48,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        "text_config": _text(48, 256 + len(TOKENS), 4),
        "audio_token_id": IDS["<|audio_pad|>"],
        "image_token_id": IDS["<|image_pad|>"],
        "video_token_id": IDS["<|video_pad|>"],
        "audio_start_token_id": IDS["<|audio_start|>"],
        "vision_start_token_id": IDS["<|vision_start|>"],
        "user_token_id": IDS["<|user|>"],
    }


def _talker() -> dict[str, Any]:
    return {
        "text_config": {**_text(32, CODES, 3), "shared_expert_intermediate_size": 24},
        "code_predictor_config": {
            "vocab_size": CODEBOOK,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_code_groups": QUANTIZERS,
        },
        "num_code_groups": QUANTIZERS,
        "thinker_hidden_size": 48,
        "accept_hidden_layer": 2,
        "spatial_merge_size": 2,
        "codec_pad_id": CODEBOOK + 1,
        "codec_bos_id": CODEBOOK + 2,
        "codec_eos_token_id": END,
        "codec_nothink_id": CODEBOOK + 4,
        "codec_think_bos_id": CODEBOOK + 5,
        "codec_think_eos_id": CODEBOOK + 6,
        "audio_token_id": IDS["<|audio_pad|>"],
        "image_token_id": IDS["<|image_pad|>"],
        "video_token_id": IDS["<|video_pad|>"],
        "audio_start_token_id": IDS["<|audio_start|>"],
        "vision_start_token_id": IDS["<|vision_start|>"],
        "speaker_id": {"ada": CODEBOOK + 7, "bob": CODEBOOK + 8},
    }


def _code2wav() -> dict[str, Any]:
    return {
        "codebook_size": CODEBOOK,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "sliding_window": 6,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_quantizers": QUANTIZERS,
        "upsample_rates": (2, 2),
        "upsampling_ratios": (2,),
        "decoder_dim": 16,
        "layer_scale_initial_scale": 1.0,
    }


def save_qwen3(folder: Path, seed: int = 6) -> Path:
    """Write the model with two voices as a checkpoint folder."""
    return write_once(_save, folder, seed)


def _save(folder: Path, seed: int) -> None:
    config = Qwen3OmniMoeConfig(
        thinker_config=_thinker(),
        talker_config=_talker(),
        code2wav_config=_code2wav(),
        im_start_token_id=IDS["<|im_start|>"],
        im_end_token_id=IDS["<|im_end|>"],
        tts_pad_token_id=IDS["<tts_pad>"],
        tts_bos_token_id=IDS["<tts_text_bos>"],
        tts_eos_token_id=IDS["<tts_text_eod>"],
        system_token_id=IDS["<|system|>"],
        user_token_id=IDS["<|user|>"],
        assistant_token_id=IDS["<|assistant|>"],
    )
    with torch.random.fork_rng(), torch.no_grad(), silence_transformers():
        torch.manual_seed(seed)
        model: Any = Qwen3OmniMoeForConditionalGeneration(config)
        for name, weight in model.talker.named_parameters():
            if ".experts." in name:  # which transformers leaves uninitialized (5.23)
                weight.normal_(std=0.02)
        # The weights are large enough that attention changes the result, and that the waveform
        # fills a quarter of its range.
        for part in (model.thinker, model.talker, model.code2wav):
            for weight in part.parameters():
                if weight.ndim >= 2:
                    weight.mul_(6)
        model.save_pretrained(folder)
    write_byte_tokenizer(folder, TOKENS, _CHAT_TEMPLATE)
    hears = WhisperFeatureExtractor(
        feature_size=16, sampling_rate=16_000, return_attention_mask=True
    )
    sees = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2}
    settings = {**sees, "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 16_384}
    settings |= hears.to_dict()
    settings.pop("mel_filters", None)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
