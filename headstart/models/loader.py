"""Loading a model: find it, check its files, load it with transformers, prove that it works."""

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

from headstart.errors import UnsupportedModelError
from headstart.models.checkpoint import check_decoder
from headstart.models.compatibility.paged_kv import check_config
from headstart.models.compatibility.proven import probe_once, stamp_files
from headstart.models.decoder import DecoderModel
from headstart.models.files import check_files, find_folder
from headstart.models.prefetch import ReadyMemory
from headstart.models.pretrained import (
    fast_dtype,
    find_device,
    find_dtype,
    load_config,
    load_weights,
)
from headstart.models.silence_transformers import silence_transformers
from headstart.models.simplify import simplify
from headstart.models.swap import accelerate
from headstart.models.vision import VISION_MODELS

__all__ = ["DecoderModel", "load_model"]


def load_model(
    model: str | Path,
    dtype: str = "auto",
    device: str = "cpu",
    ready_memory: ReadyMemory | None = None,
) -> DecoderModel:
    """Load and check a model by local path or hub name; a backend can then be attached.

    `dtype` is auto (see `fast_dtype`), float32, bfloat16 or float16. Packed weights lie in
    `ready_memory` if it is given and large enough. Raises `ConfigError`, `ModelNotFoundError`,
    `DamagedModelError` (the files), `UnsupportedModelError` (the architecture); the cheap checks
    come first.
    """
    weights_dtype, wanted = find_dtype(dtype), find_device(device)
    folder = find_folder(model)
    check_files(folder)
    files = stamp_files(folder)
    weights_dtype = fast_dtype(weights_dtype, folder, wanted)
    with silence_transformers():
        config = load_config(folder)
        check_config(config)
        if config.model_type not in {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VISION_MODELS}:
            raise UnsupportedModelError(
                f"model_type {config.model_type!r} is not a causal language model: transformers "
                "has no decoder for it that gives the next token's logits"
            )
        loaded = _load_weights(folder, config, weights_dtype)
        loaded = loaded.to(wanted).eval()  # type: ignore[arg-type]
        fusion = accelerate(loaded, ready_memory)
        decoder = DecoderModel(loaded, probe_once(loaded, files), folder, fusion)
        simplify(decoder)
    return decoder


def _load_weights(
    folder: Path, config: PreTrainedConfig, dtype: str | torch.dtype
) -> PreTrainedModel:
    sees = config.model_type in VISION_MODELS
    auto: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    families = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if sees else MODEL_FOR_CAUSAL_LM_MAPPING
    family: Any = families[type(config)]
    check_decoder(folder, config, family._keys_to_ignore_on_load_unexpected or ())
    eager = {"text_config": "eager"} if sees else "eager"
    return load_weights(
        auto.from_pretrained, folder, config=config, dtype=dtype, attn_implementation=eager
    )
