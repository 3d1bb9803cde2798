"""Loads a model with transformers, and proves that it works over paged K/V."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headstart.errors import DamagedModelError, UnsupportedModelError
from headstart.models.compatibility.paged_kv import check_config
from headstart.models.compatibility.proven import probe_once
from headstart.models.files import OMNI_TYPES, stamp_files
from headstart.models.silence_transformers import silence_transformers
from headstart.models.transformers_backend.checkpoint import check_decoder
from headstart.models.transformers_backend.decoder import TransformersDecoder
from headstart.models.transformers_backend.image_families import VISION_MODELS
from headstart.models.transformers_backend.pack import pack_linears
from headstart.models.transformers_backend.pretrained import (
    load_config,
    load_weights,
    reading_config,
)
from headstart.models.transformers_backend.quantize import quantize_linears
from headstart.native.pages import ReadyMemory
from headstart.weights.format import WeightKind

__all__ = ["load_transformers"]


def load_transformers(
    folder: Path,
    dtype: str | torch.dtype,
    device: torch.device,
    ready_memory: ReadyMemory | None = None,
    weights: WeightKind | None = None,
) -> TransformersDecoder:
    """The model in `folder`, if transformers has its architecture and it runs over paged K/V.

    Raises `DamagedModelError`, `UnsupportedModelError` or `OutOfMemoryError`.
    """
    files = stamp_files(folder)
    with silence_transformers():
        config = load_config(folder)
        with reading_config(folder, config.model_type):
            check_config(config)
        if config.model_type not in {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VISION_MODELS}:
            raise UnsupportedModelError(_why_not(config.model_type))
        loaded = _load_weights(folder, config, dtype)
        loaded = loaded.to(device).eval()  # type: ignore[arg-type]
        if weights is None:
            pack_linears(loaded, ready_memory)
        else:
            quantize_linears(loaded, weights)
        decoder = TransformersDecoder(loaded, probe_once(loaded, files), folder)
        decoder.files = files
    if not decoder.has_its_files:
        raise DamagedModelError(f"the files in {folder} were written to while they were read")
    return decoder


def _why_not(kind: str) -> str:
    if kind in OMNI_TYPES:
        return f"model_type {kind!r} speaks: Omni and headstart serve run it"
    return (
        f"model_type {kind!r} is not a causal language model: transformers has no decoder for it "
        "that gives the next token's logits"
    )


def _load_weights(
    folder: Path, config: PreTrainedConfig, dtype: str | torch.dtype
) -> PreTrainedModel:
    sees = config.model_type in VISION_MODELS
    auto: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    families = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if sees else MODEL_FOR_CAUSAL_LM_MAPPING
    family: Any = families[type(config)]
    with reading_config(folder, config.model_type):
        check_decoder(folder, config, family._keys_to_ignore_on_load_unexpected or ())
    eager = {"text_config": "eager"} if sees else "eager"
    return load_weights(
        auto.from_pretrained, folder, config=config, dtype=dtype, attn_implementation=eager
    )
