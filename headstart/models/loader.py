"""Loading a model: find it, check its files, load it with transformers, prove that it works."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headstart.errors import ConfigError, DamagedModelError, UnsupportedModelError
from headstart.models.ahead import ReadyMemory
from headstart.models.decoder import DecoderModel
from headstart.models.files import check_files, find_folder, read_json
from headstart.models.probe import check_config, probe_model
from headstart.models.quiet import quiet
from headstart.models.simplify import simplify
from headstart.models.swap import accelerate
from headstart.models.vision import VISION_MODELS

__all__ = ["DecoderModel", "load_model"]

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


def load_model(
    model: str | Path,
    dtype: str = "auto",
    device: str = "cpu",
    ready_memory: ReadyMemory | None = None,
) -> DecoderModel:
    """A model by local path or hub name, checked and ready for a backend to be attached.

    `dtype` is one of auto (as the checkpoint says), float32, bfloat16, float16; packed weights lie
    in `ready_memory` if that is given and fits them. Raises `ConfigError`, `ModelNotFoundError`,
    `DamagedModelError` (the files), `UnsupportedModelError` (the architecture); the cheap checks
    come first.
    """
    if dtype != "auto" and dtype not in _DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; it may be auto, {', '.join(_DTYPES)}")
    wanted = _device(device)
    folder = find_folder(model)
    check_files(folder)
    with quiet():
        config = _load_config(folder)
        check_config(config)
        if config.model_type not in {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VISION_MODELS}:
            raise UnsupportedModelError(
                f"model_type {config.model_type!r} is not a causal language model: transformers "
                "has no decoder for it that gives the next token's logits"
            )
        loaded = _load_weights(folder, config, "auto" if dtype == "auto" else _DTYPES[dtype])
        loaded = loaded.to(wanted).eval()  # type: ignore[arg-type]
        fusion = accelerate(loaded, ready_memory)
        decoder = DecoderModel(loaded, probe_model(loaded), folder, fusion)
        simplify(decoder)
    return decoder


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device is {name!r}, which torch cannot use here: {error}") from error
    return device


def _load_config(folder: Path) -> PreTrainedConfig:
    raw = read_json(folder / "config.json")
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise DamagedModelError(f"{folder / 'config.json'} names no model_type")
    if kind not in CONFIG_MAPPING:
        reason = "it brings code of its own, which is not run" if "auto_map" in raw else "unknown"
        raise UnsupportedModelError(
            f"model_type {kind!r} is not one of transformers' architectures ({reason})"
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    # What a wrong value raises depends on the architecture's own checks.
    except Exception as error:
        raise DamagedModelError(
            f"{folder / 'config.json'} does not describe a {kind} model: {error}"
        ) from error
    assert isinstance(config, PreTrainedConfig)
    return config


def _load_weights(
    folder: Path, config: PreTrainedConfig, dtype: str | torch.dtype
) -> PreTrainedModel:
    sees = config.model_type in VISION_MODELS
    auto: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    try:
        loaded: Any = auto.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation={"text_config": "eager"} if sees else "eager",
            local_files_only=True,
            ignore_mismatched_sizes=True,  # told by name and shape below
            output_loading_info=True,
        )
    except ImportError as error:
        raise UnsupportedModelError(f"{folder} needs a package that is missing: {error}") from error
    # transformers raises OSError, RuntimeError, ValueError, KeyError, and safetensors its own.
    except Exception as error:
        raise DamagedModelError(
            f"the model in {folder} cannot be built: {type(error).__name__}: {error}"
        ) from error
    model, report = loaded
    assert isinstance(model, PreTrainedModel)
    _check_fit(folder, model, report)
    return model


def _check_fit(folder: Path, model: PreTrainedModel, report: dict[str, Any]) -> None:
    """Refuse weights that leave a parameter at random, or that hold more layers than asked for."""
    missing = sorted(report["missing_keys"])
    if missing:
        raise DamagedModelError(
            f"the weights in {folder} do not fit its config.json: {len(missing)} parameters are "
            f"missing, {_some(missing)}"
        )
    mismatched = [
        f"{name} is {list(found)} and not {list(wanted)}"
        for name, found, wanted in sorted(report["mismatched_keys"])
    ]
    if mismatched:
        raise DamagedModelError(
            f"the weights in {folder} do not fit its config.json: {len(mismatched)} parameters "
            f"have another shape, {_some(mismatched)}"
        )
    # Other parameters that nobody asked for do no harm: buffers of old versions, a vision tower.
    layers = {_layer(name) for name, _ in model.named_parameters()}
    stacks = {stack for stack, _ in layers}
    unexpected = sorted(report["unexpected_keys"])
    beyond = [k for k in unexpected if _layer(k) not in layers and _layer(k)[0] in stacks]
    if beyond:
        raise DamagedModelError(
            f"the weights in {folder} do not fit its config.json: they hold more layers than it "
            f"names, {_some(beyond)}"
        )


def _layer(name: str) -> tuple[str, str]:
    """The list of layers that a parameter belongs to, and which of them.

    >>> _layer("model.layers.7.mlp.up_proj.weight")
    ('model.layers', '7')
    """
    parts = name.split(".")
    place = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return (name, "") if place is None else (".".join(parts[:place]), parts[place])


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
