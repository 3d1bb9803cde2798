"""A Qwen2.5-Omni of 400,000 parameters: the real classes, random weights, made on the spot."""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

AUDIO, IMAGE, VISION_START, VISION_END, AUDIO_START, AUDIO_END = 500, 501, 505, 506, 503, 504
_TOKENS = {
    "audio_token_index": AUDIO,
    "image_token_index": IMAGE,
    "video_token_index": 502,
    "audio_start_token_id": AUDIO_START,
    "audio_end_token_id": AUDIO_END,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
_TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
}
_THINKER = {
    "audio_config": {
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "num_mel_bins": 16,
        "output_dim": 64,
        "n_window": 20,
        "max_source_positions": 200,
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 16,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
    },
    "text_config": _TEXT,
    **_TOKENS,
}
_TALKER = {
    "vocab_size": 300,
    "embedding_size": 64,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 2, 3]},
    "spatial_merge_size": 2,
    "tts_text_start_token_id": 507,
    "tts_text_end_token_id": 508,
    "tts_text_pad_token_id": 509,
    "tts_codec_start_token_id": 290,
    "tts_codec_end_token_id": 291,
    "tts_codec_pad_token_id": 292,
    "tts_codec_mask_token_id": 293,
    **_TOKENS,
}
_TOKEN2WAV = {
    "dit_config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
        "ff_mult": 2,
        "emb_dim": 16,
        "num_embeds": 300,
        "mel_dim": 16,
        "repeats": 2,
        "block_size": 4,
        "look_ahead_layers": [1],
        "look_backward_layers": [0],
        "enc_emb_dim": 8,
        "enc_dim": 8,
        "enc_channels": [16, 16, 16, 16, 48],
        "enc_kernel_sizes": [5, 3, 3, 3, 1],
        "enc_dilations": [1, 2, 3, 4, 1],
        "enc_attention_channels": 8,
        "enc_res2net_scale": 2,
        "enc_se_channels": 8,
        "enc_lin_neurons": 8,
    },
    "bigvgan_config": {
        "mel_dim": 16,
        "upsample_initial_channel": 32,
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3, 5]],
        "upsample_rates": [4, 2],
        "upsample_kernel_sizes": [8, 4],
    },
}


def save_qwen25(folder: Path) -> Path:
    """The model with two voices, as a checkpoint folder."""
    config = Qwen2_5OmniConfig(
        thinker_config=_THINKER, talker_config=_TALKER, token2wav_config=_TOKEN2WAV
    )
    torch.manual_seed(11)
    model: Any = Qwen2_5OmniForConditionalGeneration(config)
    with torch.no_grad():
        for part in (model.thinker, model.talker):
            for weight in part.parameters():
                if weight.ndim == 2:  # wide enough that what is attended to decides what is said
                    weight.mul_(6)
    model.save_pretrained(folder)
    voices = {
        name: {
            "bos_token": 507 - at,
            "cond": torch.randn(1, 8),
            "ref_mel": torch.randn(1, 30, 16),
        }
        for at, name in enumerate(["Ada", "Bob"])
    }
    torch.save(voices, folder / "spk_dict.pt")
    return folder
