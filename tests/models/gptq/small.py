"""Small random models of every family, with a tokenizer, as checkpoints to quantize."""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from headstart.models.families import FAMILIES
from tests.tiny_models import tiny_model
from tests.tiny_tokenizers import TINY_TOKENIZERS

__all__ = ["BASE", "FAMILY_NAMES", "TEXT", "save_small"]

_ATTENTION = {"full_attention", "sliding_attention"}
FAMILY_NAMES = [
    name
    for name, family in FAMILIES.items()
    if family.kinds <= _ATTENTION and "value_norm" not in family.facts
]
TEXT = " ".join(
    f"the {number} other days, then another answer to {number * 7}" for number in range(400)
)

BASE: dict[str, Any] = {
    "vocab_size": 448,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MORE: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 20},
    "smollm3": {"no_rope_layers": [1, 0]},
    "gemma2": {"sliding_window": 20, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0},
    "gemma3_text": {
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {"original_max_position_embeddings": 256},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
}


def save_small(
    folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """Write the checkpoint; return its model, in float32."""
    defaults = {"attention_bias": True} if name in ("llama", "granite") else {}
    config = CONFIG_MAPPING[name](**{**BASE, **defaults, **_MORE.get(name, {}), **changes})
    model = tiny_model(config)
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if "norm" in part:  # norms of ones would hide that they are divided
                parameter.add_(torch.linspace(-0.4, 0.6, parameter.numel()))
    model.to(dtype).save_pretrained(folder)
    TINY_TOKENIZERS["byte_level"]().save_pretrained(folder)
    return model.float()
