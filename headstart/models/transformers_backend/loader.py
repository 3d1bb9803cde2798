"""Loads transformers' models from files, and proves that a decoder works over paged K/V."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.quantizers.auto import AutoHfQuantizer

from headstart.errors import (
    DamagedModelError,
    HeadstartError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from headstart.models.files import OMNI_TYPES, read_json, stamp_files
from headstart.models.out_of_memory import is_out_of_memory
from headstart.models.silence_transformers import silence_transformers
from headstart.models.transformers_backend.checkpoint import check_decoder, check_report
from headstart.models.transformers_backend.decoder import TransformersDecoder
from headstart.models.transformers_backend.image_encoder import VISION_MODELS
from headstart.models.transformers_backend.linears import pack_linears, quantize_linears
from headstart.models.transformers_backend.probe import check_config, probe_once
from headstart.native.pages import ReadyMemory
from headstart.weights.format import WeightKind

__all__ = ["load_config", "load_transformers", "load_weights", "reading_config"]


def load_config(folder: Path) -> PreTrainedConfig:
    """transformers' configuration of the model in `folder`.

    Raises `DamagedModelError`, `UnsupportedModelError` for an architecture, or a way to quantise
    weights, that transformers does not have, and `OutOfMemoryError`.
    """
    raw = read_json(folder / "config.json")
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise DamagedModelError(f"{folder / 'config.json'} names no model_type")
    if kind not in CONFIG_MAPPING:
        reason = "it brings code of its own, which is not run" if "auto_map" in raw else "unknown"
        raise UnsupportedModelError(
            f"model_type {kind!r} is not one of transformers' architectures ({reason})"
        )
    with reading_config(folder, kind):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        assert isinstance(config, PreTrainedConfig)
        for part in (config, config.get_text_config(decoder=True)):
            _check_method(folder, getattr(part, "quantization_config", None))
    return config


@contextmanager
def reading_config(folder: Path, kind: str) -> Iterator[None]:
    """Report an error of transformers' configuration of this kind as `DamagedModelError`."""
    try:
        yield
    except HeadstartError:
        raise
    # The exception for a wrong value depends on the architecture's own checks.
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemoryError(f"no memory to read {folder / 'config.json'}") from error
        raise DamagedModelError(
            f"{folder / 'config.json'} does not describe a {kind} model: {error}"
        ) from error


def _check_method(folder: Path, quantised: object) -> None:
    """Check that transformers reads weights of this `quantization_config`.

    It loads others as they are, without their scales, and logs a warning.
    """
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    if method is None:
        return
    if not isinstance(method, str) or not AutoHfQuantizer.supports_quant_method(quantised):
        raise UnsupportedModelError(
            f"the weights in {folder} are quantised by {method!r}, in a way that neither headstart "
            "nor transformers reads"
        )


def load_weights(
    from_pretrained: Callable[..., Any], folder: Path, **options: Any
) -> PreTrainedModel:
    """Load a model of a transformers class with `from_pretrained`; no parameter stays random.

    Raises `DamagedModelError` if weights and configuration differ, `UnsupportedModelError` if a
    package is missing, and `OutOfMemoryError`.
    """
    try:
        loaded: Any = from_pretrained(
            folder,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # reported by name and shape below
            output_loading_info=True,
            **options,
        )
    except ImportError as error:
        raise UnsupportedModelError(f"{folder} needs a package that is missing: {error}") from error
    # transformers raises OSError, RuntimeError, ValueError, KeyError, and safetensors its own.
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemoryError(
                f"memory does not hold the model in {folder}: {type(error).__name__}: {error}"
            ) from error
        raise DamagedModelError(
            f"the model in {folder} cannot be built: {type(error).__name__}: {error}"
        ) from error
    model, report = loaded
    assert isinstance(model, PreTrainedModel)
    check_report(folder, model, report)
    return model


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
