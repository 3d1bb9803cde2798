"""Tiny vision-language models with random weights, a byte-level tokenizer and PIL's processors.

The weights are large, as in `tests/tiny_models.py`, so that the content of an image changes the
answer.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessorPil,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.tiny_models import write_once

__all__ = ["TINY_VISION", "make_image", "save_tiny_vision"]

SPECIAL = (
    "<pad>",
    "<s>",
    "</s>",
    "<image>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{col}>" for row in range(1, 4) for col in range(1, 4)),
)
VOCABULARY = 512
IDS = {text: 256 + place for place, text in enumerate(SPECIAL)}
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": IDS["<pad>"],
    "bos_token_id": IDS["<s>"],
    "eos_token_id": IDS["</s>"],
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def _llava() -> tuple[PreTrainedModel, object, str]:
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**_TOWER),
        text_config=LlamaConfig(**_TEXT),
        image_token_id=IDS["<image>"],
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    return LlavaForConditionalGeneration(config), processor, "<image>"


_QWEN_TEXT = {
    **_TEXT,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [2, 3, 3],
    },
}
_QWEN_TOWER = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN_IDS = {
    "image_token_id": IDS["<|image_pad|>"],
    "video_token_id": IDS["<|video_pad|>"],
    "vision_start_token_id": IDS["<|vision_start|>"],
    "vision_end_token_id": IDS["<|vision_end|>"],
}


def _qwen2_5() -> tuple[PreTrainedModel, object, str]:
    tower = {
        **_QWEN_TOWER,
        "hidden_size": 32,
        "out_hidden_size": 64,
        "intermediate_size": 64,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(text_config=_QWEN_TEXT, vision_config=tower, **_QWEN_IDS)
    return Qwen2_5_VLForConditionalGeneration(config), *_qwen_parts()


def _qwen2() -> tuple[PreTrainedModel, object, str]:
    tower = {**_QWEN_TOWER, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    config = Qwen2VLConfig(text_config=_QWEN_TEXT, vision_config=tower, **_QWEN_IDS)
    return Qwen2VLForConditionalGeneration(config), *_qwen_parts()


def _qwen_parts() -> tuple[object, str]:
    size = {"shortest_edge": 64, "longest_edge": 4096}
    processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size)
    return processor, "<|vision_start|><|image_pad|><|vision_end|>"


def _idefics() -> tuple[PreTrainedModel, object, str]:
    config = Idefics3Config(
        vision_config=_TOWER,
        text_config=LlamaConfig(**_TEXT),
        image_token_id=IDS["<image>"],
        scale_factor=2,
        pad_token_id=IDS["<pad>"],
    )
    processor = Idefics3ImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
    )
    return Idefics3ForConditionalGeneration(config), processor, "<image>"


def _smolvlm() -> tuple[PreTrainedModel, object, str]:
    config = SmolVLMConfig(
        vision_config=_TOWER,
        text_config=LlamaConfig(**_TEXT),
        image_token_id=IDS["<image>"],
        scale_factor=2,
        pad_token_id=IDS["<pad>"],
    )
    processor = SmolVLMImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
    )
    return SmolVLMForConditionalGeneration(config), processor, "<image>"


TINY_VISION: dict[str, Callable[[], tuple[PreTrainedModel, object, str]]] = {
    "llava": _llava,
    "qwen2_vl": _qwen2,
    "qwen2_5_vl": _qwen2_5,
    "idefics3": _idefics,
    "smolvlm": _smolvlm,
}


def _tokenizer(template: str) -> PreTrainedTokenizerFast:
    symbols = bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE(vocab={symbols[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def save_tiny_vision(name: str, folder: Path) -> Path:
    """Write a tiny model with its tokenizer and image processor into `folder`."""
    return write_once(_save, folder, name)


def _save(folder: Path, name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, processor, placeholder = TINY_VISION[name]()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, parameter[0].numel() ** -0.5)
                elif parameter_name.endswith("bias"):
                    parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)  # type: ignore[attr-defined]
    _tokenizer(TEMPLATE.replace("IMAGE", placeholder)).save_pretrained(folder)


def make_image(seed: int, width: int = 40, height: int = 32) -> Image.Image:
    """Return an image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
