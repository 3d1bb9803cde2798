"""The demo vision model: a generated LLaVA of 17 million parameters.

Its weights are random, from a fixed seed. Every pixel has an effect on the answer, which is noise.
An image has 196 embeddings.
"""

from pathlib import Path

import torch
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from headstart.models.demo import favor_printable_bytes, make_cached_folder, write_byte_tokenizer
from headstart.models.transformers_tools import silence_transformers

_SEED = 21
_SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<image>")
_PAD, _, _END_OF_TURN, _IMAGE = range(256, 256 + len(_SPECIAL_TOKENS))
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>\n{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def demo_vision_path() -> Path:
    """Return the folder of the model, written if it does not exist yet. Raises ModelError."""
    return make_cached_folder("demo-vision", [Path(__file__)], _write)


def _write(folder: Path) -> None:
    write_byte_tokenizer(folder, _SPECIAL_TOKENS, _CHAT_TEMPLATE)
    CLIPImageProcessorPil(
        size={"shortest_edge": 224}, crop_size={"height": 224, "width": 224}
    ).save_pretrained(folder)
    config = LlavaConfig(  # type: ignore[call-arg] # image_token_id is an alias
        vision_config=CLIPVisionConfig(
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=4,
            image_size=224,
            patch_size=16,
        ),
        text_config=LlamaConfig(
            vocab_size=256 + len(_SPECIAL_TOKENS),
            hidden_size=384,
            intermediate_size=1152,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=8192,
            pad_token_id=_PAD,
            bos_token_id=None,
            eos_token_id=_END_OF_TURN,
        ),
        image_token_id=_IMAGE,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad(), silence_transformers():
        torch.manual_seed(_SEED)
        model = LlavaForConditionalGeneration(config)
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, weight[0].numel() ** -0.5)
            elif name.endswith("bias"):
                weight.zero_()
        favor_printable_bytes(model.lm_head.weight)
        model.generation_config = GenerationConfig(eos_token_id=_END_OF_TURN, pad_token_id=_PAD)
        model.save_pretrained(folder)
