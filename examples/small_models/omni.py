"""A small generated Qwen2.5-Omni: transformers' classes with random weights.

Its text is random letters. Its speech is one note for each code (`voice.py`). Each stage does the
work of the same stage in the real model. The model is written once to the user's cache folder, as
an ordinary checkpoint.
"""

import json
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    WhisperFeatureExtractor,
)

from examples.small_models import voice as demo_voice
from examples.small_models.voice import CHANNELS, NOTES, RATES, give_voice
from headstart.models.demo import make_cached_folder, write_byte_tokenizer
from headstart.models.transformers_tools import silence_transformers

_SPECIAL_TOKENS = (
    *("<|pad|>", "<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|IMAGE|>", "<|VIDEO|>"),
    *("<|audio_bos|>", "<|audio_eos|>", "<|vision_bos|>", "<|vision_eos|>"),
    *("<|speech_bos_ada|>", "<|speech_bos_bob|>", "<|speech_eos|>", "<|speech_pad|>"),
)
IDS = {text: token_id for token_id, text in enumerate(_SPECIAL_TOKENS, start=256)}
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MEL_BINS = 16
_MEL_DIM = NOTES
_CODES, _CODEC_IDS = 290, ("start", "end", "pad", "mask")
_MEDIA = {
    "audio_token_index": IDS["<|AUDIO|>"],
    "image_token_index": IDS["<|IMAGE|>"],
    "video_token_index": IDS["<|VIDEO|>"],
    "audio_start_token_id": IDS["<|audio_bos|>"],
    "audio_end_token_id": IDS["<|audio_eos|>"],
    "vision_start_token_id": IDS["<|vision_bos|>"],
    "vision_end_token_id": IDS["<|vision_eos|>"],
}


@dataclass(frozen=True, slots=True)
class OmniSizes:
    """Sizes of the language models; encoders and vocoder have the smallest possible sizes.

    scale: factor of two-dimensional weights; a larger factor makes tokens depend more on attention.
    readable: the text has only letters, spaces, periods and commas.
    """

    thinker_width: int
    thinker_layers: int
    talker_width: int
    talker_layers: int
    heads: int
    scale: float = 1.0
    readable: bool = True


DEMO_OMNI = OmniSizes(384, 6, 192, 4, 6)


def demo_omni_path(sizes: OmniSizes = DEMO_OMNI) -> Path:
    """Return the folder of the model, written if it does not exist yet. Raises ModelError."""
    recipes = [Path(__file__), Path(demo_voice.__file__)]
    name = f"demo-omni-{sizes.thinker_width}"
    return make_cached_folder(name, recipes, lambda folder: write_omni(folder, sizes))


def write_omni(folder: Path, sizes: OmniSizes, seed: int = 11) -> None:
    """Write a model of these sizes: weights, voices, tokenizer, feature extractor."""
    config = Qwen2_5OmniConfig(
        thinker_config=_thinker(sizes), talker_config=_talker(sizes), token2wav_config=_token2wav()
    )
    with torch.random.fork_rng(), silence_transformers():
        torch.manual_seed(seed)
        model: Any = Qwen2_5OmniForConditionalGeneration(config)
        with torch.no_grad():
            _shape_weights(model, sizes)
            give_voice(model.token2wav)
        model.save_pretrained(folder)
        voices = {
            name: {
                "bos_token": IDS[f"<|speech_bos_{name.lower()}|>"],
                "cond": torch.randn(1, 8),
                "ref_mel": torch.randn(1, 30, _MEL_DIM),
            }
            for name in ("Ada", "Bob")
        }
    torch.save(voices, folder / "spk_dict.pt")
    write_byte_tokenizer(folder, _SPECIAL_TOKENS, _CHAT_TEMPLATE)
    audio = WhisperFeatureExtractor(
        feature_size=_MEL_BINS, sampling_rate=16_000, return_attention_mask=True
    )
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 64,
        "max_pixels": 16_384,
    }
    settings = {**images, **audio.to_dict()}
    settings.pop("mel_filters", None)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def _shape_weights(model: Any, sizes: OmniSizes) -> None:
    for part in (model.thinker, model.talker):
        for weight in part.parameters():
            if weight.ndim == 2:
                weight.mul_(sizes.scale)
    if sizes.readable:
        # Only letters and punctuation are likely. A token depends mostly on the previous token, so
        # that no two logits are so close that rounding decides between them.
        shown = torch.zeros(len(model.thinker.lm_head.weight), 1)
        shown[[ord(character) for character in string.ascii_letters + " .,"]] = 8
        model.thinker.lm_head.weight.mul_(shown)
        model.thinker.get_input_embeddings().weight.mul_(25)


def _text(width: int, layers: int, heads: int) -> dict[str, Any]:
    half = width // heads // 2
    third = half // 4
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [third, half - third - half // 2, half // 2],
        },
    }


def _thinker(sizes: OmniSizes) -> dict[str, Any]:
    width = sizes.thinker_width
    return {
        "audio_config": {
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "num_mel_bins": _MEL_BINS,
            "output_dim": width,
            "n_window": 20,
            "max_source_positions": 1500,
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
            "out_hidden_size": width,
            "fullatt_block_indexes": [1],
        },
        "text_config": {
            **_text(width, sizes.thinker_layers, sizes.heads),
            "vocab_size": 256 + len(_SPECIAL_TOKENS),
        },
        **_MEDIA,
    }


def _talker(sizes: OmniSizes) -> dict[str, Any]:
    return {
        **_text(sizes.talker_width, sizes.talker_layers, sizes.heads),
        "head_dim": sizes.talker_width // sizes.heads,
        "vocab_size": _CODES + len(_CODEC_IDS),
        "embedding_size": sizes.thinker_width,
        "spatial_merge_size": 2,
        "tts_text_start_token_id": IDS["<|speech_bos_ada|>"],
        "tts_text_end_token_id": IDS["<|speech_eos|>"],
        "tts_text_pad_token_id": IDS["<|speech_pad|>"],
        **{f"tts_codec_{name}_token_id": _CODES + index for index, name in enumerate(_CODEC_IDS)},
        **_MEDIA,
    }


def _token2wav() -> dict[str, Any]:
    return {
        "dit_config": {
            "hidden_size": 2 * NOTES,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "head_dim": 16,
            "ff_mult": 2,
            "emb_dim": NOTES,
            "num_embeds": _CODES + len(_CODEC_IDS),
            "mel_dim": _MEL_DIM,
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
            "mel_dim": _MEL_DIM,
            "upsample_initial_channel": CHANNELS,
            "resblock_kernel_sizes": [3],
            "resblock_dilation_sizes": [[1, 3, 5]],
            "upsample_rates": list(RATES),
            "upsample_kernel_sizes": [16, 11, 8, 7],
        },
    }
